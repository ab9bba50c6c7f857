"""Inputs of a run's memory estimate, and the unit that it is counted in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from harness.layout.division import tensor_shard
from harness.layout.grid import Grid
from harness.layout.optimizer_table import GroupRule, Parameter, optimizer_groups
from harness.layout.shape import Shape
from harness.layout.stages import Bounds, in_flight, stage_shape
from harness.layout.tensors import Tensor

Evidence = Literal["measured", "traced", "read", "guessed"]
"""measured: equal to live bytes of real runs; traced: to what autograd saves of the real model;
read: in the sources of DeepSpeed, torch or transformers; guessed: by analogy."""
EVIDENCE: tuple[Evidence, ...] = ("measured", "traced", "read", "guessed")
Place = Literal["device", "host", "nvme"]

GIB = 2**30
FP32 = 4  # bytes
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_DTYPE_BYTES = {"fp32": 4, "float32": 4, "float": 4, "torch.float32": 4}  # others: 2

# In the order of a step.  `build` happens once; `built` lacks Adam's moments, which the first step
# makes; every other phase is that of a later step.
PHASES = (
    "build",
    "built",
    "forward",
    "loss",
    "backward_first",
    "backward_last",
    "reduce",
    "gradients_ready",
    "norm",
    "cast",
    "step",
    "between_steps",
    "evaluation",
    "save",
)
ALWAYS = frozenset(PHASES)
STEPPED = ALWAYS - {"build", "built"}
BACKWARD = frozenset({"backward_first", "backward_last"})


@dataclass(frozen=True)
class Held:
    """Bytes that one component holds in the phases it lives in."""

    component: str
    bytes: int
    phases: frozenset[str]
    evidence: Evidence
    place: Place = "device"


@dataclass(frozen=True)
class ZeroSettings:
    """The keys of the DeepSpeed JSON that cost memory; sizes count elements."""

    stage: int
    offload_optimizer: Place
    offload_param: Place
    offload_ratio: float
    reduce_bucket: int
    overlap_given: bool | None
    """overlap_comm; None leaves it to the stage."""
    contiguous_gradients: bool
    prefetch_bucket: int
    persistence_threshold: int
    max_reuse_distance: int
    sub_group_size: int
    secondary_ranks: int
    """zero_hpz_partition_size: ranks over which a second copy of the weights is spread."""
    sum_bytes: int | None
    """Bytes of data_types.grad_accum_dtype; None follows the model."""
    comm_bytes: int | None
    """Bytes of communication_data_type; None follows the model."""
    sequence_comm_bytes: int
    """Bytes of the same where sequences are divided over ranks."""
    half_master: bool
    half_moments: bool
    optimizer: str
    momentum: float
    torch_adam: bool
    nvme_buffers: int
    nvme_param_buffers: int
    nvme_param_buffer: int
    gather_on_save: bool

    @classmethod
    def read(cls, value: Callable[[str], Any]) -> ZeroSettings:
        """`value(key)` gives a dotted key's literal, or DeepSpeed's own default."""

        def zero(key: str) -> Any:
            return value(f"zero_optimization.{key}")

        def place(section: str) -> Place:
            device = str(zero(f"{section}.device"))
            return {"cpu": "host", "nvme": "nvme"}.get(device, "device")  # type: ignore[return-value]

        def width(key: str) -> int | None:
            name = value(key)
            return None if name is None else _DTYPE_BYTES.get(str(name), 2)

        stage = int(zero("stage"))
        optimizer = value("optimizer.params") or {}
        return cls(
            stage=stage,
            offload_optimizer=place("offload_optimizer") if stage else "device",
            offload_param=place("offload_param") if stage == 3 else "device",
            offload_ratio=float(zero("offload_optimizer.ratio")),
            reduce_bucket=int(zero("reduce_bucket_size")),
            overlap_given=zero("overlap_comm"),
            contiguous_gradients=bool(zero("contiguous_gradients")),
            prefetch_bucket=int(zero("stage3_prefetch_bucket_size")),
            persistence_threshold=int(zero("stage3_param_persistence_threshold")),
            max_reuse_distance=int(zero("stage3_max_reuse_distance")),
            sub_group_size=int(zero("sub_group_size")),
            secondary_ranks=int(zero("zero_hpz_partition_size")),
            sum_bytes=width("data_types.grad_accum_dtype"),
            comm_bytes=width("communication_data_type"),
            sequence_comm_bytes=width("seq_parallel_communication_data_type") or FP32,
            half_master=bool(
                value("bf16.bf16_master_weights_and_grads")
                or value("fp16.fp16_master_weights_and_grads")
            ),
            half_moments=bool(value("bf16.bf16_optimizer_states")),
            optimizer=str(value("optimizer.type")).lower(),
            momentum=float(optimizer.get("momentum", 0.0)),
            torch_adam=bool(optimizer.get("torch_adam", False)),
            nvme_buffers=int(zero("offload_optimizer.buffer_count")),
            nvme_param_buffers=int(zero("offload_param.buffer_count")),
            nvme_param_buffer=int(zero("offload_param.buffer_size")),
            gather_on_save=bool(zero("stage3_gather_16bit_weights_on_model_save")),
        )

    @property
    def overlap_comm(self) -> bool:
        """True if gradients are reduced while the backward pass goes on."""
        return self.stage == 3 if self.overlap_given is None else self.overlap_given


@dataclass(frozen=True)
class Inputs:
    """A run, as far as its memory goes."""

    shape: Shape
    zero: ZeroSettings
    precision: Literal["fp32", "bf16", "fp16"]
    grid: Grid
    micro_batch: int
    """Samples that a rank takes at once."""
    seq_len: int
    """Tokens of a sample."""
    grad_accum: int
    """Micro-batches per optimizer step."""
    checkpointing: Literal["none", "full"] = "none"
    attention: str = "sdpa"
    fused: bool = False
    """True if operations are fused (model.kernels, model.compile), which is not counted."""
    document_mask: bool = False
    """True if tokens attend only within their own document: the mask is then a tensor."""
    activation: str = ""
    """The MLP's activation function, by its Hugging Face name; "" for the family's usual one."""
    dropout: float = 0.0
    loads_weights: bool = False
    """True if weights are read (model.init_from) rather than drawn."""
    saves_in_background: bool = False
    """True if what is saved is copied to the host (save.async)."""
    gpus_per_node: int = 1
    accelerator: Literal["cuda", "cpu"] = "cuda"
    rules: tuple[GroupRule, ...] = ()
    """optim.groups."""
    bounds: Bounds | None = None
    """The split of the model's units over pipeline stages; None without any."""
    parallel_residual: bool = True
    """True if GPT-NeoX's attention and MLP read norms of one input (use_parallel_residual)."""
    traced_layer_bytes: float | None = None
    """Traced bytes that a layer keeps of a token; None if the operations are counted."""
    stage: int | None = None
    """The pipeline stage that `shape` is; None where it is the whole model."""

    def of_stage(self, stage: int) -> Inputs:
        """Return the run with the part of the model that the first tensor-parallel rank of a
        pipeline stage has.
        """
        shape = tensor_shard(self.shape, self.grid.tensor)
        if self.bounds is None:
            return replace(self, shape=shape)
        return replace(self, shape=stage_shape(shape, self.bounds, stage), stage=stage)

    @property
    def has_head(self) -> bool:
        """True if the loss is computed here."""
        return self.stage in (None, self.grid.pipeline - 1)

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are held at a time."""
        if self.stage is None:
            return 1
        return in_flight(self.grid.pipeline, self.stage, self.grad_accum)

    @property
    def accumulates(self) -> bool:
        """True if gradients of earlier micro-batches are there when most activations are."""
        return self.grad_accum > self.in_flight

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight as the model computes with it."""
        return ELEMENT_BYTES[self.precision]

    @property
    def sum_bytes(self) -> int:
        """Bytes of an accumulated gradient's element."""
        return self.zero.sum_bytes or self.element_bytes

    @property
    def comm_bytes(self) -> int:
        """Bytes of a gradient's element on its way to other ranks (engine.py; where sequences are
        divided, stage_1_and_2.py takes fp32 whatever the JSON says).
        """
        if self.grid.sequence > 1:
            return FP32 if self.zero.stage in (1, 2) else self.zero.sequence_comm_bytes
        return self.zero.comm_bytes or self.element_bytes

    @property
    def shards(self) -> int:
        """Ranks that ZeRO spreads states over."""
        return self.grid.data * self.grid.sequence

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.seq_len // self.grid.sequence

    def groups(self) -> list[list[Tensor]]:
        """The parameter groups of the optimizer, each in the model's order.

        Matrices decay; biases, norms and embeddings, tied to the head or not, do not.
        """
        tensors = {tensor.name: tensor for tensor in self.shape.tensors()}
        parameters = (
            Parameter(
                name,
                matrix=len(tensor.shape) >= 2 and tensor.kind != "embedding",
                head=tensor.kind == "head",
            )
            for name, tensor in tensors.items()
        )
        groups = optimizer_groups(parameters, 1.0, self.rules, self.zero.optimizer == "muon")
        return [[tensors[name] for name in names] for _, names in groups]

    @property
    def parameters(self) -> int:
        """Elements of all parameters on one rank, unsharded."""
        return sum(tensor.numel for tensor in self.shape.tensors())


def as_size(size: float) -> str:
    """Bytes in GiB, or in MiB where that would be less than one: a small disk is not 0.00 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.2f} MiB"
