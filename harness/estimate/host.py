"""Memory outside torch's allocator: what the driver reports, host memory, NVMe, checkpoints.

driver.toml has the driver's figures (context, kernels, NCCL's buffers) and their sources. They are
intervals: libraries load kernels on demand, and NCCL uses as many channels as it finds links.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import ALWAYS, FP32, GIB, STEPPED, Interval, MemoryItem
from harness.estimate.partition import sub_groups
from harness.estimate.states import master_bytes, moment_bytes
from harness.layout.grid import Grid

# A rank that has imported torch, transformers and deepspeed, before any weights.
PROCESS_HOST = int(0.5 * GIB)
# Added by CUDA: a process that trains 5 million parameters uses 2.2 GiB on an H200 (torch 2.11,
# CUDA 13). With all kernels loaded, depending on the driver or CUDA_MODULE_LOADING, it uses 0.8 GiB
# more (torch issue 12873).
CUDA_HOST = int(1.7 * GIB)
_MIB = 2**20
_UNKNOWN = "hopper"
"""Generation assumed if no GPU is named."""
CHECKPOINT_COPY = "checkpoint copy"


@dataclass(frozen=True)
class Generation:
    """One table of driver.toml; sizes in MiB."""

    gpus: list[str]
    context: list[float]
    workspace: float
    first: list[float]
    more: list[float]
    source: str


_TABLES = tomllib.loads(Path(__file__).with_name("driver.toml").read_text(encoding="utf-8"))
GENERATIONS = {name: Generation(**table) for name, table in _TABLES.items()}


def generation_of(gpu: str | None) -> Generation:
    """Return the generation for a key of gpus.toml; Hopper if the key is None."""
    matching = (each for each in GENERATIONS.values() if gpu in each.gpus)
    return next(matching, GENERATIONS[_UNKNOWN])


def communicators(grid: Grid, secondary_ranks: int = 1) -> int:
    """Return the number of NCCL communicators of a rank.

    They are those of all ranks, and of DeepSpeed's copy of that group (comm/torch.py); with stages,
    of the groups along and across the pipeline (runtime/pipe/topology.py); with any other axis, of
    a group and its complement.
    """
    if grid.world_size == 1:  # DeepSpeed's collectives run even for one rank
        return 1
    axes = 2 * (grid.pipeline > 1) + 2 * (grid.tensor > 1) + 2 * (grid.sequence > 1)
    return 2 + axes + 2 * (grid.expert > 1) + (secondary_ranks > 1)


@lru_cache(maxsize=1024)
def driver_bytes(grid: Grid, gpu: str | None, secondary_ranks: int = 1) -> Interval:
    """Return the bytes that a rank uses on its GPU outside torch's allocator."""
    kind, count = generation_of(gpu), communicators(grid, secondary_ranks)

    def total(end: int) -> int:
        groups = kind.first[end] + (count - 1) * kind.more[end]
        return int((kind.context[end] + groups) * _MIB)

    return Interval(total(0), total(1))


def process(inputs: Inputs) -> list[MemoryItem]:
    """Return a rank's memory before any tensor; on a GPU also what its libraries allocate."""
    is_cuda = inputs.accelerator == "cuda"
    size = PROCESS_HOST + (CUDA_HOST if is_cuda else 0)
    parts = [MemoryItem("process", size, ALWAYS, "measured" if is_cuda else "guessed", "host")]
    if is_cuda:
        # One handle per thread that multiplies: the forward thread and autograd's.
        workspaces = 2 * int(generation_of(inputs.gpu).workspace * _MIB)
        parts.append(MemoryItem("cuBLAS workspaces", workspaces, STEPPED, "measured"))
    return parts


def loading(inputs: Inputs) -> list[MemoryItem]:
    """Return the copies of weights on the host while the model is built."""
    building = frozenset({"build"})
    units = inputs.shape.body.units
    piece = max(sum(tensor.numel for tensor in unit) for unit in units)
    is_divided = inputs.grid.tensor > 1 or inputs.grid.expert > 1 or inputs.quantization
    if inputs.loads_weights and is_divided:  # a piece is read, then sharded or quantized
        size = inputs.element_bytes * piece
    elif inputs.loads_weights and inputs.zero.stage < 3:
        # from_pretrained reads the whole model before moving it to the device.
        size = inputs.element_bytes * inputs.parameters
    else:
        # Weights are drawn in fp32 on the CPU, one piece at a time (models/initialize.py).
        size = FP32 * piece
    return [MemoryItem("weights being made", size, building, "read", "host")]


def nvme_buffers(inputs: Inputs) -> list[MemoryItem]:
    """Return the pinned host buffers through which states and weights are swapped."""
    zero = inputs.zero
    buffers = []
    if zero.offload_optimizer == "nvme":
        subs = sub_groups(inputs.groups(), inputs.shards, zero.sub_group_size)
        # optimizer_utils.py: each buffer holds the largest sub-group in fp32.
        size = zero.nvme_buffers * FP32 * max(subs)
        buffers.append(MemoryItem("nvme optimizer buffers", size, ALWAYS, "read", "host"))
    if zero.offload_param == "nvme":
        size = zero.nvme_param_buffers * zero.nvme_param_buffer * inputs.element_bytes
        buffers.append(MemoryItem("nvme parameter buffers", size, ALWAYS, "read", "host"))
    return buffers


def saving(inputs: Inputs) -> list[MemoryItem]:
    """Return the copy that is written while training continues (save.async), and scales of 8-bit
    moments, of which a checkpoint has two for every element (engine/eight_bit.py).
    """
    parts = []
    if inputs.zero.optimizer == "adamw8bit":
        size = 2 * FP32 * inputs.sharded_parameters
        phases = frozenset({"build", "save"})
        parts.append(MemoryItem("scales of a checkpoint", size, phases, "read", "host"))
    if inputs.saves_in_background:
        size = checkpoint_bytes(inputs) * inputs.sharded_parameters // inputs.trained
        parts.append(MemoryItem(CHECKPOINT_COPY, size, STEPPED, "read", "host"))
    return parts


def pinned_rounding(inputs: Inputs, parts: Iterable[MemoryItem]) -> list[MemoryItem]:
    """Return the bytes that torch adds when rounding pinned memory up to powers of two
    (CachingHostAllocator.h). Each component counts as one block, activations as one per layer. A
    run disables this rounding unless the user has set allocators or this torch cannot.
    """
    if not inputs.rounds_pinned:
        return []
    pageable = {"process", "moments", "weights being made"}
    if inputs.zero.stage == 3:
        pageable.add("master")

    def is_pinned(part: MemoryItem) -> bool:
        if part.component == CHECKPOINT_COPY:
            return True
        pins = inputs.zero.pins or _is_activation(part)
        return part.place == "host" and pins and part.component not in pageable

    def rounded(part: MemoryItem) -> int:
        blocks = inputs.in_flight * inputs.shape.num_layers if _is_activation(part) else 1
        return blocks << (-(-part.bytes // blocks) - 1).bit_length()

    return [
        MemoryItem("pinned rounding", rounded(p) - p.bytes, p.phases, "guessed", "host")
        for p in parts
        if is_pinned(p) and p.bytes
    ]


def _is_activation(part: MemoryItem) -> bool:
    return part.component.startswith("activations")


def checkpoint_bytes(inputs: Inputs) -> int:
    """Return the bytes of a checkpoint: master weights and moments (checkpoint/tensor_file.py)."""
    moments = moment_bytes(inputs)
    if inputs.zero.optimizer == "adamw8bit":  # two codes and two scales per element
        moments = 2 * (1 + 4)
    # With adapters the frozen weights come from model.init_from and are not saved.
    frozen = 0 if inputs.adapters else inputs.element_bytes * inputs.frozen
    return int((master_bytes(inputs) + moments) * inputs.trained) + frozen
