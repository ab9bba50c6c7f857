"""Inputs of a run's memory estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from harness.estimate.memory_item import Place
from harness.estimate.partition import (
    Flat,
    is_of_experts,
    parameter_groups,
    quantized_elements,
    trained_tensors,
)
from harness.layout.adapters import Adapters, Quantization
from harness.layout.expert import expert_shard
from harness.layout.grid import Grid
from harness.layout.optimizer_table import GroupRule, is_frozen
from harness.layout.recompute import REVERSIBLE, Checkpointing, is_checkpointed, loss_chunk
from harness.layout.shape import Shape, Tensor
from harness.layout.stages import Bounds, in_flight, stage_shape
from harness.layout.tensor import divides_vocabulary, tensor_shard

_DTYPE_BYTES = {"fp32": 4, "float32": 4, "float": 4, "torch.float32": 4}  # others: 2


@dataclass(frozen=True)
class ZeroSettings:
    """The keys of the DeepSpeed JSON that affect memory; sizes count elements."""

    stage: int
    offload_optimizer: Place
    offload_param: Place
    offload_ratio: float
    reduce_bucket: int
    overlap_given: bool | None
    """overlap_comm; None: the stage's default."""
    contiguous_gradients: bool
    prefetch_bucket: int
    persistence_threshold: int
    max_reuse_distance: int
    max_live: int
    """stage3_max_live_parameters: maximum number of gathered elements."""
    has_leaves: bool
    """True if the JSON lists modules to gather as a whole."""
    sub_group_size: int
    secondary_ranks: int
    """zero_hpz_partition_size: ranks that share a second copy of the weights."""
    pins: bool
    """True if offloaded data is in pinned memory."""
    sum_bytes: int | None
    """Bytes of data_types.grad_accum_dtype; None: as the model."""
    comm_bytes: int | None
    """Bytes of communication_data_type; None: as the model."""
    half_master: bool
    half_moments: bool
    optimizer: str
    momentum: float
    torch_adam: bool
    fused_adam: bool
    """True if torch's fused Adam is used, which needs no temporaries."""
    nvme_buffers: int
    nvme_param_buffers: int
    nvme_param_buffer: int

    @classmethod
    def read(cls, value: Callable[[str], Any]) -> ZeroSettings:
        """Return the settings; `value(key)` gives a key's literal, or DeepSpeed's default."""

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
            max_live=int(zero("stage3_max_live_parameters")),
            has_leaves=value("zero_optimization.leaf_module") is not None,
            sub_group_size=int(zero("sub_group_size")),
            secondary_ranks=int(zero("zero_hpz_partition_size")),
            pins=any(
                place(section) != "device" and zero(f"{section}.pin_memory")
                for section in ("offload_optimizer", "offload_param")
            ),
            sum_bytes=width("data_types.grad_accum_dtype"),
            comm_bytes=width("communication_data_type"),
            half_master=bool(
                value("bf16.bf16_master_weights_and_grads")
                or value("fp16.fp16_master_weights_and_grads")
            ),
            half_moments=bool(value("bf16.bf16_optimizer_states")),
            optimizer=str(value("optimizer.type")).lower(),
            momentum=float(optimizer.get("momentum", 0.0)),
            torch_adam=bool(optimizer.get("torch_adam", False)),
            fused_adam=bool(optimizer.get("fused", False)),
            nvme_buffers=int(zero("offload_optimizer.buffer_count")),
            nvme_param_buffers=int(zero("offload_param.buffer_count")),
            nvme_param_buffer=int(zero("offload_param.buffer_size")),
        )

    @property
    def overlap_comm(self) -> bool:
        """True if gradients are reduced during the backward pass."""
        return self.stage == 3 if self.overlap_given is None else self.overlap_given


Way = Literal["traced", "traced through reference code", "traced with kernels"]
"""How layers were traced. Those with a recurrent state: through transformers' reference code, or as
with another package's kernels, from what their sources save (models/state_kernels.py)."""
BY_REFERENCE: Way = "traced through reference code"
WITH_KERNELS: Way = "traced with kernels"


@dataclass(frozen=True)
class LayerTrace:
    """Traced bytes that are saved per token."""

    layers: tuple[float, ...]
    """Bytes for each of the model's layers."""
    selective: tuple[float, ...]
    """Bytes for each layer with selective checkpointing, its input included."""
    outside: float = 0.0
    """Bytes outside the layers, including all logits."""
    way: Way = "traced"


ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Inputs:
    """The settings of a run that determine its memory."""

    shape: Shape
    zero: ZeroSettings
    precision: Literal["fp32", "bf16", "fp16"]
    grid: Grid
    micro_batch: int
    """Samples per rank and forward pass."""
    seq_len: int
    """Tokens per sample."""
    grad_accum: int
    """Micro-batches per optimizer step."""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing of decoder layers; "reversible" is one kind."""
    activation_offload: bool = False
    """True if what checkpointed layers keep is offloaded to host memory."""
    mlp_tiles: int = 1
    """Number of parts in which dense MLPs process the tokens."""
    attention: str = "sdpa"
    attention_sizes: tuple[tuple[str, int], ...] = ()
    """Sizes of an approximate kind of attention."""
    liger: bool = False
    """True if norms, MLPs, and the head with the loss are Liger's kernels (model.kernels)."""
    compiled: bool = False
    """True if layers are compiled (model.compile)."""
    float8: bool = False
    """True if linear layers of the decoder layers multiply in float8 (model.float8)."""
    loss_chunk: int | None = None
    """model.loss_chunk."""
    smooths_labels: bool = False
    """True if labels are smoothed, or the loss is one of run.code; Liger's loss is then not fused
    with the head."""
    document_mask: bool = False
    """True if attention is confined to documents; the mask is then a tensor."""
    seen_tokens: float | None = None
    """Mean number of tokens that a token attends to in its document, including itself; None if the
    data is unknown, as if every row were one document."""
    activation: str = ""
    """The MLP's activation function by its Hugging Face name; "" for the family's default."""
    dropout: float = 0.0
    loads_weights: bool = False
    """True if weights are loaded (model.init_from) rather than drawn."""
    carried_numbers: int = 0
    """Size of the state carried from window to window, per row (train.carry_state)."""
    saves_in_background: bool = False
    """True if checkpoints are copied to the host first (save.async)."""
    rounds_pinned: bool = False
    """True if torch rounds blocks of pinned memory up to powers of two."""
    gpus_per_node: int = 1
    accelerator: Literal["cuda", "cpu"] = "cuda"
    gpu: str | None = None
    """The GPU's key in gpus.toml; None if no known GPU was named."""
    expandable: bool = True
    """True if torch's allocator uses expandable_segments."""
    rules: tuple[GroupRule, ...] = ()
    """optim.groups."""
    adapters: Adapters | None = None
    """Low-rank adapters (model.lora), the only trained parameters."""
    bounds: Bounds | None = None
    """Split of the model's units over pipeline stages; None without stages."""
    sends_parts: bool = True
    """True if each tensor-parallel rank of a stage sends its part of the hidden states."""
    divides_residuals: bool = False
    """True if tensor-parallel ranks divide the residual stream by tokens."""
    parallel_residual: bool = True
    """True if GPT-NeoX's attention and MLP read norms of the same input (use_parallel_residual)."""
    trace: LayerTrace | None = None
    """Traced bytes of the model; None if its operations are counted instead."""
    stage: int | None = None
    """The pipeline stage that `shape` describes; None for the whole model."""
    autocast: bool = False
    """True if matrix products are computed in bf16 with weights in fp32 (torch_autocast)."""
    divides_vocabulary: bool = False
    """True if `shape` has a shard of the vocabulary."""

    def of_stage(self, stage: int) -> Inputs:
        """Return the run with a pipeline stage's part of the first tensor-parallel rank."""
        return self._of_rank.undivided_stage(stage)

    @cached_property
    def _of_rank(self) -> Inputs:
        """The run with the shard of every layer that the first tensor-parallel rank has."""
        if self.grid.tensor == self.grid.expert == 1:
            return self
        return replace(
            self,
            shape=expert_shard(tensor_shard(self.shape, self.grid.tensor), self.grid.expert),
            divides_vocabulary=divides_vocabulary(self.shape, self.grid.tensor),
        )

    def undivided_stage(self, stage: int) -> Inputs:
        """Return the run with a whole pipeline stage, not sharded further."""
        if self.bounds is None:
            return self
        return replace(self, shape=stage_shape(self.shape, self.bounds, stage), stage=stage)

    @property
    def fused(self) -> bool:
        """True if operations are fused, by kernels or by the compiler."""
        return self.liger or self.compiled

    @property
    def gathers_layers(self) -> bool:
        """True if ZeRO 3 gathers a decoder layer, and reduces its gradients, as a whole; module by
        module takes twice the host time (docs/performance.md).

        False for traced models, if the JSON lists modules to gather, if DeepSpeed may not hold two
        such layers, or if gradients of a layer's weights may come after that of its input: with
        reversible layers, adapters or optim.groups, which may freeze weights.
        """
        if self.compiled:  # hooks on modules would break a layer's graph
            return self.zero.stage == 3
        if self.zero.stage != 3 or self.checkpointing == REVERSIBLE or self.trace is not None:
            return False
        if self.adapters or self.rules or self.zero.has_leaves:
            return False
        return 2 * self.layer_elements <= self.zero.max_live

    @property
    def layer_elements(self) -> int:
        """Elements of the largest decoder layer."""
        layers = self.shape.body.layers
        return max(sum(tensor.numel for tensor in layer) for layer in layers)

    @property
    def layers_by(self) -> str:
        """Origin of the layers' bytes: counted, or the way they were traced."""
        return "counted" if self.trace is None else self.trace.way

    @property
    def first_layer(self) -> int:
        """Index, in the whole model, of this stage's first decoder layer."""
        if self.bounds is None or self.stage is None:
            return 0
        return max(self.bounds[self.stage], 1) - 1

    @property
    def layers_alike(self) -> list[list[int]]:
        """This stage's layers grouped by kind: layers with the same tensors, window, traced bytes
        and checkpointing need the same memory.
        """
        return _layers_alike(self.shape, self.checkpointing, self.first_layer, self.trace)

    @property
    def has_head(self) -> bool:
        """True if the loss is computed on this stage."""
        return self.stage in (None, self.grid.pipeline - 1)

    @property
    def in_flight(self) -> int:
        """Number of micro-batches whose activations are held at the same time."""
        if self.stage is None:
            return 1
        return in_flight(self.grid.pipeline, self.stage, self.grad_accum)

    @property
    def accumulates(self) -> bool:
        """True if gradients of earlier micro-batches exist when activations are at their peak."""
        return self.grad_accum > self.in_flight

    @property
    def products(self) -> Literal["fp32", "bf16", "fp16"]:
        """The precision of matrix products."""
        return "bf16" if self.autocast else self.precision

    @property
    def element_bytes(self) -> int:
        """Bytes per weight in the model's compute precision."""
        return ELEMENT_BYTES[self.precision]

    @property
    def sum_bytes(self) -> int:
        """Bytes per element of an accumulated gradient."""
        return self.zero.sum_bytes or self.element_bytes

    @property
    def comm_bytes(self) -> int:
        """Bytes per element of a gradient in communication (engine.py)."""
        return self.zero.comm_bytes or self.element_bytes

    @property
    def shards(self) -> int:
        """Number of ranks that ZeRO shards states over."""
        return self.grid.data * self.grid.sequence

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch on one rank."""
        return self.micro_batch * self.seq_len // self.grid.sequence

    @property
    def stream_tokens(self) -> int:
        """Tokens per micro-batch whose residuals one rank has."""
        whole_rows = self.mlp_tiles > 1 or self.seq_len // self.grid.sequence % self.grid.tensor
        return self.tokens // (self.grid.tensor if self.divides_residuals and not whole_rows else 1)

    @property
    def chunk(self) -> int:
        """Entries of the rank's vocabulary per chunk of logits in the loss; 0: all."""
        return loss_chunk(self.loss_chunk, self.shape.vocab_size, self.tokens)

    @property
    def fuses_loss(self) -> bool:
        """True if the head is fused with the training loss, which never holds all logits."""
        return self.liger and not self.smooths_labels

    def shards_of(self, group: Sequence[Tensor]) -> int:
        """Return the number of ranks that ZeRO shards a group's states over; for experts, the ranks
        that have the same experts.
        """
        return self.shards // (self.grid.expert if is_of_experts(group) else 1)

    @cached_property
    def flats(self) -> list[Flat]:
        """The parameter groups as ZeRO 1 and 2 lay them out."""
        expert = self.grid.expert
        return [
            Flat(
                tuple(tensor.numel for tensor in group),
                self.shards_of(group),
                expert if is_of_experts(group) else 1,
            )
            for group in self.groups()
        ]

    @property
    def sharded_parameters(self) -> int:
        """Trained elements in one rank's shards, without padding."""
        return sum(
            sum(tensor.numel for tensor in group) // self.shards_of(group)
            for group in self.groups()
        )

    @cached_property
    def trained_tensors(self) -> list[Tensor]:
        """The parameters that the optimizer updates."""
        return trained_tensors(self.shape, self.rules, self.adapters)

    @cached_property
    def frozen_tensors(self) -> list[Tensor]:
        """The parameters without gradients and optimizer states."""
        if self.adapters is not None:
            whole = {tensor.name for tensor in self.adapters.trained_whole(self.shape)}
            return [tensor for tensor in self.shape.tensors() if tensor.name not in whole]
        rules = self.rules
        return [t for t in self.shape.tensors() if is_frozen(t.name, rules)] if rules else []

    def groups(self) -> list[list[Tensor]]:
        """Return the optimizer's parameter groups (partition.py)."""
        muon, divided = self.zero.optimizer == "muon", self.grid.expert > 1
        return parameter_groups(self.shape, self.rules, self.adapters, muon, divided)

    @property
    def parameters(self) -> int:
        """Number of all parameters on one rank, before ZeRO shards them."""
        return self.trained + self.frozen

    @cached_property
    def trained(self) -> int:
        """Number of trained parameters, before ZeRO shards them."""
        if self.adapters is None and not self.rules:
            return self.shape.parameters
        return sum(tensor.numel for tensor in self.trained_tensors)

    @cached_property
    def frozen(self) -> int:
        """Number of frozen parameters, before ZeRO shards them."""
        return sum(tensor.numel for tensor in self.frozen_tensors)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the frozen parameters, before ZeRO shards them."""
        quantized = quantized_elements(self.shape, self.quantization)
        kept = self.frozen - sum(quantized)
        own = self.quantization
        return self.element_bytes * kept + sum(own.weight_bytes(n) for n in quantized if own)

    @property
    def quantization(self) -> Quantization | None:
        """Quantization of the frozen linear weights; None if they are not quantized."""
        return None if self.adapters is None else self.adapters.quantization

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of the largest quantized weight when dequantized; 0 if none is quantized."""
        largest = max(quantized_elements(self.shape, self.quantization), default=0)
        own = self.quantization
        return 0 if own is None else own.temporary_bytes(largest, self.element_bytes)


@lru_cache(maxsize=256)
def _layers_alike(
    shape: Shape, checkpointing: Checkpointing, first: int, trace: LayerTrace | None
) -> list[list[int]]:
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, tensors in enumerate(shape.body.layers):
        kind = (
            id(tensors),  # identical layers share one object (Body)
            shape.sliding_windows[index] if shape.sliding_windows else None,
            trace.layers[first + index] if trace else None,
            is_checkpointed(checkpointing, first + index),
        )
        kinds.setdefault(kind, []).append(index)
    return [*kinds.values()]
