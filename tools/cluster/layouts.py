"""Enumerates the layouts of a job that train.py accepts, with their config keys."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from harness.config.batch import divisors
from harness.estimate.inputs import Inputs
from harness.layout.exclusions import sequence_problems
from harness.layout.expert import ExpertPlan
from harness.layout.grid import Grid, axes_json
from harness.layout.recompute import REVERSIBLE, Checkpointing
from harness.layout.recompute import WAYS as NAMED_WAYS
from harness.layout.shape import Shape
from harness.layout.stages import Bounds, split
from harness.layout.tensor import tensor_problems, whole_stream

Offload = Literal["none", "optimizer", "all"]
State = tuple[int, Offload, bool]
STATES: tuple[State, ...] = (
    *((1, "none", False), (2, "none", False), (3, "none", False), (3, "none", True)),
    *((1, "optimizer", False), (2, "optimizer", False), (3, "optimizer", False)),
    (3, "all", False),
)
"""ZeRO stage, states offloaded to the host, and True if each node keeps a copy of the weights
(hpZ). Pipelines use only ZeRO 1, since gradients are summed in fp32. ZeRO 0 is left out: in bf16 it
runs as ZeRO 1.
"""
WAYS: tuple[Checkpointing, ...] = (*NAMED_WAYS, 4, 2)
"""Activation checkpointing modes; n recomputes one layer in n."""
KEYS = {
    "micro_batch": "train.micro_batch",
    "checkpointing": "model.checkpointing",
    "activation_offload": "model.activation_offload",
    "mlp_tiles": "model.mlp_tiles",
}
"""Run config keys that a layout sets, by field of Layout."""
_USUAL: dict[str, tuple[object, ...]] = {
    "model.checkpointing": ("none", REVERSIBLE),  # model.reversible sets the second
    "model.activation_offload": (False,),
    "model.mlp_tiles": (1,),
}
"""Values that need not be written, by run config key."""
_MOST_STAGES = 64
MOST_MICRO_BATCH = 32
_LONG = 16_384
"""Sequence length in tokens from which tiled MLPs and offloaded activations are also tried."""


@dataclass(frozen=True)
class Layout:
    """One way to distribute a job over its GPUs: all settings that a user chooses."""

    zero: int
    offload: Offload
    pipeline: int
    tensor: int
    sequence: int
    expert: int
    micro_batch: int
    checkpointing: Checkpointing
    activation_offload: bool = False
    mlp_tiles: int = 1
    hpz: bool = False
    """True if each node keeps a copy of the weights (ZeRO++, arXiv 2306.10209)."""

    @property
    def text(self) -> str:
        """Short description of the layout."""
        offloaded = {"none": "", "optimizer": ", optimizer offloaded", "all": ", all offloaded"}
        axes = ("pipeline", "tensor", "sequence", "expert")
        sizes = [f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        way = self.checkpointing
        every = f"every {way} layers" if isinstance(way, int) else way
        again = [] if way == "none" else [f"checkpointing {every}"]
        again += ["activations offloaded"] if self.activation_offload else []
        again += [f"MLPs in {self.mlp_tiles} tiles"] if self.mlp_tiles > 1 else []
        hpz = " hpZ" if self.hpz else ""
        parts = [f"ZeRO {self.zero}{hpz}{offloaded[self.offload]}", *sizes]
        return ", ".join([*parts, f"micro-batch {self.micro_batch}", *again])

    @property
    def way(self) -> tuple[object, ...]:
        """Everything except the micro-batch and the activation settings."""
        return *self.state, self.pipeline, self.tensor, self.sequence, self.expert

    @property
    def state(self) -> State:
        """Entry of STATES that the layout uses."""
        return self.zero, self.offload, self.hpz

    @property
    def takes_liger(self) -> bool:
        """True if Liger's kernels are supported: no axis but data."""
        return max(self.pipeline, self.tensor, self.sequence, self.expert) == 1

    @property
    def can_compile(self) -> bool:
        """True if its layers can be compiled."""
        is_plain = not self.activation_offload and self.mlp_tiles == 1
        return is_plain and self.pipeline == self.expert == 1

    @property
    def deepspeed(self) -> dict[str, Any]:
        """DeepSpeed JSON of the layout."""
        axes = axes_json(self.pipeline, self.tensor, self.sequence, self.expert)
        return {**base_json(self.state), **axes}

    @property
    def overrides(self) -> dict[str, Any]:
        """Run config keys of the layout, by name."""
        values = {key: getattr(self, name) for name, key in KEYS.items()}
        return {key: value for key, value in values.items() if value not in _USUAL.get(key, ())}

    def inputs(
        self, base: Inputs, gpus: int, global_batch: int, liger: bool, compiled: bool
    ) -> Inputs:
        """Return the inputs of its estimates; `base` has the same ZeRO stage and offload."""
        grid = Grid(gpus, self.pipeline, self.tensor, self.sequence, self.expert)
        tokens, is_reversible = base.seq_len // self.sequence, self.checkpointing == REVERSIBLE
        row = base.shape, tokens, self.tensor, self.mlp_tiles, is_reversible
        return replace(
            base,
            grid=grid,
            liger=liger,
            compiled=compiled,
            micro_batch=self.micro_batch,
            grad_accum=global_batch // grid.data // self.micro_batch,
            checkpointing=self.checkpointing,
            activation_offload=self.activation_offload,
            mlp_tiles=self.mlp_tiles,
            divides_residuals=self.tensor > 1 and not whole_stream(*row),
            bounds=bounds_of(
                *(base.shape, self.pipeline, base.seq_len, self.checkpointing, self.mlp_tiles)
            ),
        )


@cache
def bounds_of(
    shape: Shape, stages: int, seq_len: int, checkpointing: Checkpointing, mlp_tiles: int
) -> Bounds | None:
    """Return the split of a model over pipeline stages; None for one stage."""
    return split(shape, stages, seq_len, checkpointing, mlp_tiles) if stages > 1 else None


def base_json(state: State) -> dict[str, Any]:
    """Return the DeepSpeed JSON of an entry of STATES, without parallel axes."""
    zero, offload, hpz = state
    section: dict[str, Any] = {"stage": zero}
    if zero == 3:
        names = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
        section |= dict.fromkeys((*names, "stage3_param_persistence_threshold"), "auto")
    if hpz:
        section["zero_hpz_partition_size"] = "auto"
    if offload != "none":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if offload == "all":
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "bf16": {"enabled": "auto"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": section,
    }


def layouts(
    shape: Shape,
    gpus: int,
    gpus_per_node: int,
    seq_len: int,
    global_batch: int,
    lora: bool,
    quantized: bool = False,
    fixed: Mapping[str, Any] | None = None,
) -> Iterator[Layout]:
    """Yield the layouts that train.py accepts, with tensor parallelism within a node only.

    `lora`: True with adapters, which exclude tensor and expert parallelism and pipeline stages.
    `quantized`: True with 4-bit weights, which ZeRO 3 cannot shard. `fixed`: field values that all
    layouts have.
    """
    fixed = fixed or {}
    for pipeline, tensor, sequence, expert in _axes(shape, gpus, gpus_per_node, seq_len, lora):
        data = gpus // (pipeline * tensor * sequence)
        if global_batch % data:
            continue
        axes = pipeline, tensor, sequence, expert
        for zero, offload, hpz in STATES:
            if quantized and zero == 3:
                continue
            if not _makes_sense((zero, offload, hpz), axes, gpus, gpus_per_node):
                continue
            for micro_batch in _micro_batches(global_batch // data, fixed):
                spread = zero, offload, *axes, micro_batch
                every = [Layout(*spread, way, hpz=hpz) for way in WAYS]
                if seq_len >= _LONG:
                    every += _for_long(Layout(*spread, "full", hpz=hpz), shape)
                yield from (
                    dict.fromkeys(replace(each, **fixed) for each in every) if fixed else every
                )


def _makes_sense(
    state: State, axes: tuple[int, int, int, int], gpus: int, gpus_per_node: int
) -> bool:
    """Return False for states that pipeline stages reject, for hpZ with other axes or on one node,
    and for ZeRO 2 and 3 that shard nothing and so equal ZeRO 1.
    """
    (zero, offload, hpz), (pipeline, tensor, *_) = state, axes
    if pipeline > 1:
        return state == STATES[0]
    if hpz:
        return max(axes) == 1 and gpus > gpus_per_node
    return zero == 1 or offload != "none" or gpus > tensor


def _for_long(layout: Layout, shape: Shape) -> Iterator[Layout]:
    yield replace(layout, activation_offload=True)
    if not shape.num_experts:
        yield replace(layout, mlp_tiles=8)
        yield replace(layout, activation_offload=True, mlp_tiles=8)


def _axes(
    shape: Shape, gpus: int, gpus_per_node: int, seq_len: int, lora: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (pipeline, tensor, sequence, expert) that divide the model and the ranks."""
    for tensor in [1] if lora else _divisors(gpus, gpus_per_node):
        if tensor_problems(shape, tensor):
            continue
        most = 1 if lora else min(_MOST_STAGES, shape.num_layers)
        for pipeline in _divisors(gpus // tensor, most):
            yield pipeline, tensor, 1, 1
        for sequence in _divisors(gpus // tensor, gpus):
            if sequence > 1 and sequence_problems(shape, sequence, seq_len, tensor):
                continue
            for expert in [1] if lora else _experts(shape, gpus // tensor):
                if sequence > 1 or expert > 1:
                    yield 1, tensor, sequence, expert


def _experts(shape: Shape, ranks: int) -> list[int]:
    if not shape.num_experts:
        return [1]
    try:
        return ExpertPlan.make(shape.model_type, shape.num_experts).legal(ranks)
    except ValueError:
        return [1]


def _micro_batches(samples: int, fixed: Mapping[str, Any]) -> list[int]:
    """Return the micro-batches into which a data rank's samples of a step can be divided."""
    if size := fixed.get("micro_batch"):
        return [] if samples % size else [size]
    return _divisors(samples, MOST_MICRO_BATCH)


def _divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to `most`."""
    return [n for n in divisors(number) if n <= most]
