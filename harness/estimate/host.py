"""Bytes outside the device: host memory, NVMe, and checkpoints on disk."""

from __future__ import annotations

from harness.estimate.inputs import ALWAYS, FP32, GIB, STEPPED, Held, Inputs
from harness.estimate.partition import sub_groups
from harness.estimate.states import master_bytes, moment_bytes

# A rank that has imported torch, transformers and deepspeed, before any weight.
PROCESS_HOST = int(0.5 * GIB)
# A CUDA context with its libraries' workspaces, and NCCL's buffers.
PROCESS_DEVICE = int(1.0 * GIB)


def process(inputs: Inputs) -> list[Held]:
    """Memory of a rank's process before any tensor."""
    parts = [Held("process", PROCESS_HOST, ALWAYS, "guessed", "host")]
    if inputs.accelerator == "cuda":
        parts.append(Held("process", PROCESS_DEVICE, ALWAYS, "guessed"))
    return parts


def loading(inputs: Inputs) -> list[Held]:
    """Copies on the host while the model is built."""
    building = frozenset({"build"})
    if inputs.zero.stage < 3 and (inputs.loads_weights or inputs.grid.tensor > 1):
        # from_pretrained reads a rank's whole model before it moves to the device, or is divided.
        size = inputs.element_bytes * inputs.parameters
    else:
        # Weights are drawn in fp32 on the CPU, a piece at a time (models/initialize.py).
        units = inputs.shape.body.units
        size = FP32 * max(sum(tensor.numel for tensor in unit) for unit in units)
    return [Held("weights being made", size, building, "read", "host")]


def nvme_buffers(inputs: Inputs) -> list[Held]:
    """Pinned host buffers through which states and weights are swapped."""
    zero = inputs.zero
    buffers = []
    if zero.offload_optimizer == "nvme":
        subs = sub_groups(inputs.groups(), inputs.shards, zero.sub_group_size)
        # optimizer_utils.py: each buffer holds the largest sub-group in fp32.
        size = zero.nvme_buffers * FP32 * max(subs)
        buffers.append(Held("nvme optimizer buffers", size, ALWAYS, "read", "host"))
    if zero.offload_param == "nvme":
        size = zero.nvme_param_buffers * zero.nvme_param_buffer * inputs.element_bytes
        buffers.append(Held("nvme parameter buffers", size, ALWAYS, "read", "host"))
    return buffers


def saving(inputs: Inputs) -> list[Held]:
    """The copy that is written while training goes on (save.async)."""
    if not inputs.saves_in_background:
        return []
    size = checkpoint_bytes(inputs) // inputs.shards
    return [Held("checkpoint copy", size, STEPPED, "read", "host")]


def checkpoint_bytes(inputs: Inputs) -> int:
    """Bytes of a checkpoint's tensors: master weights and moments (checkpoint/files.py)."""
    moments = moment_bytes(inputs)
    if inputs.zero.optimizer == "adamw8bit":  # two codes, two scales for every element
        moments = 2 * (1 + 4)
    return int((master_bytes(inputs) + moments) * inputs.parameters)
