"""The layouts, precisions, accumulation and ranks from which every gate draws its cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from harness.layout.grid import axes_json

GLOBAL_BATCH = 8  # samples

Json = dict[str, Any]
C = TypeVar("C")


@dataclass(frozen=True)
class Sizes:
    """Buckets and thresholds in elements, scaled down with the model, so that a step has several
    buckets, some parameters exceed a bucket, and ZeRO 3 really partitions, as in a large run.
    """

    bucket: int
    live: int
    sub_group: int
    persistence: int
    """Smallest number of elements of a parameter that ZeRO 3 partitions."""

    def section(self, stage: int) -> Json:
        """Return the keys of a stage's `zero_optimization` that depend on the model's size."""
        if stage == 0:
            return {}
        keys = {"reduce_bucket_size": self.bucket, "allgather_bucket_size": self.bucket}
        if stage == 3:
            keys |= {
                "stage3_param_persistence_threshold": self.persistence,
                "stage3_prefetch_bucket_size": self.bucket,
                "stage3_max_live_parameters": self.live,
                "stage3_max_reuse_distance": self.live,
                "sub_group_size": self.sub_group,
            }
        return keys


@dataclass(frozen=True)
class Layout:
    """The distribution of a model over ranks, with its options."""

    stage: int
    """ZeRO stage."""
    pipeline: int = 1
    """Number of pipeline stages."""
    tensor: int = 1
    """Ranks that share every weight."""
    sequence: int = 1
    """Ranks that share every row of tokens."""
    expert: int = 1
    """Data ranks that share the experts."""
    more: Json = field(default_factory=dict)
    """Additional keys of `zero_optimization`."""
    sized: bool = True
    """False keeps DeepSpeed's own buckets and thresholds."""
    has_bf16_states: bool = False
    """True if master weights and moments are in bf16."""
    bf16_sums: bool = False
    """True if bf16 gradients are summed in bf16."""
    compiled: bool = False
    """True if every decoder layer is compiled."""
    varlen: bool = False
    """True if document bounds separate documents instead of a mask."""
    loss_chunk: int = 0
    """Vocabulary entries whose logits the loss holds at a time; 0 for all."""
    model: Json = field(default_factory=dict)
    """Additional keys of the run config's model section."""

    @property
    def kind(self) -> str:
        """Name of an approximate attention; "" for exact attention."""
        return str(self.model.get("attention", ""))

    def json(self, precision: str, sizes: Sizes, scaling: Json) -> Json:
        """Return the DeepSpeed JSON before it is resolved; `scaling` is fp16's loss scale."""
        zero = {"stage": self.stage, **(sizes.section(self.stage) if self.sized else {})}
        axes = axes_json(self.pipeline, self.tensor, self.sequence, self.expert)
        sections = {**axes, **precision_sections(precision, scaling)}
        return {"zero_optimization": {**zero, **self.more}, **sections}

    def sums_of(self, precision: str) -> str:
        """Return the precision in which a rank sums the gradients of its micro-batches."""
        if self.pipeline > 1 and self.stage == 0:  # DeepSpeed supports no other here
            return precision
        return "fp32" if precision == "bf16" and not self.bf16_sums else precision

    def full_precision(self, precision: str) -> str:
        """Return `precision` with its sums and states, as a key of `precision_sections`."""
        if precision != "bf16":
            return precision
        sums = "_fp32_sums" if self.sums_of(precision) == "fp32" else ""
        return ("bf16_states" if self.has_bf16_states else "bf16") + sums


def precision_sections(precision: str, scaling: Json) -> Json:
    """Return the JSON's sections for fp32, bf16, bf16_states or fp16, each also with
    `_fp32_sums`.
    """
    kind = precision.removesuffix("_fp32_sums")
    dtype = kind.removesuffix("_states")
    keys: Json = {"enabled": True, **(scaling if dtype == "fp16" else {})}
    if kind == "bf16_states":
        keys |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    sums = {} if kind == precision else {"data_types": {"grad_accum_dtype": "fp32"}}
    return sums | ({} if dtype == "fp32" else {dtype: keys})


_CPU = {"device": "cpu", "pin_memory": False}
_STATES = {"offload_optimizer": _CPU}
_ALL = {**_STATES, "offload_param": _CPU}
_SECOND_COPY = {"zero_hpz_partition_size": 2}
_ON_NVME = {
    "stage3_param_persistence_threshold": 64,
    "sub_group_size": 300_000,  # on two ranks, all sub-groups but the last fill a file
    "offload_optimizer": {"device": "nvme", "nvme_path": "auto", "pin_memory": False},
    "offload_param": _CPU,
}
RECOMPUTED: dict[str, Json] = {
    "full": {"checkpointing": "full"},
    "every2": {"checkpointing": 2},
    "selective": {"checkpointing": "selective"},
    "offloaded": {"checkpointing": "full", "activation_offload": True},
    "tiled": {"mlp_tiles": 3},
    "all": {"checkpointing": "selective", "activation_offload": True, "mlp_tiles": 2},
}
"""Recomputed or host-offloaded activations, by the first word of a layout."""
_REVERSIBLE: Json = {"reversible": True}
KINDS: dict[str, Json] = {
    "longformer": {"attention_window": 6, "attention_global": 2},
    "strided": {"attention_window": 4},
    "linformer": {"attention_window": 6, "attention_features": 2},
    "performer": {"attention_features": 16},
    "reformer": {"attention_buckets": 4, "attention_window": 4},
}
"""Approximate kinds of attention, by the first word of a layout."""
LAYOUTS: dict[str, Layout] = {
    **{f"zero{stage}": Layout(stage) for stage in range(4)},
    "zero1_offload": Layout(1, more=_STATES),
    "zero2_offload": Layout(2, more=_STATES),
    "zero3_offload_states": Layout(3, more=_STATES),
    "zero3_offload": Layout(3, more=_ALL),
    # Each node of two ranks has a second copy of the weights.
    "zeropp": Layout(3, more=_SECOND_COPY),
    "zero3_default": Layout(3, sized=False),  # so small that all stays whole on every rank
    "zero1_bf16_sums": Layout(1, bf16_sums=True),
    "zero3_bf16_sums": Layout(3, bf16_sums=True),
    "zero2_bf16_states": Layout(2, has_bf16_states=True),
    "zero3_bf16_states": Layout(3, has_bf16_states=True),
    "compiled_zero3": Layout(3, compiled=True),
    "compiled_zero1": Layout(1, compiled=True),
    **{f"varlen_zero{stage}": Layout(stage, varlen=True) for stage in range(4)},
    "varlen_pipe2_zero1": Layout(1, 2, varlen=True),
    "varlen_tensor2_zero1": Layout(1, tensor=2, varlen=True),
    "varlen_sequence2_zero1": Layout(1, sequence=2, varlen=True),
    # Only if DeepSpeed's asynchronous I/O (libaio) can be compiled.
    "zero3_nvme": Layout(3, more=_ON_NVME),
    **{f"pipe{n}_zero{stage}": Layout(stage, n) for n in (2, 4) for stage in (0, 1)},
    **{f"tensor{n}_zero{stage}": Layout(stage, tensor=n) for n in (2, 4) for stage in range(4)},
    "tensor2_tied_zero1": Layout(1, tensor=2),
    **{f"compiled_tensor2_zero{s}": Layout(s, tensor=2, compiled=True) for s in (1, 3)},
    **{f"compiled_sequence2_zero{s}": Layout(s, sequence=2, compiled=True) for s in (1, 3)},
    **{f"pipe2_tensor2_zero{stage}": Layout(stage, 2, tensor=2) for stage in (0, 1)},
    **{f"tensor2_expert2_zero{stage}": Layout(stage, tensor=2, expert=2) for stage in (1, 2, 3)},
    **{
        f"tensor2_sequence2_expert2_zero{stage}": Layout(stage, tensor=2, sequence=2, expert=2)
        for stage in (1, 3)
    },
    **{f"expert{n}_zero{stage}": Layout(stage, expert=n) for n in (2, 4) for stage in (1, 2, 3)},
    **{f"sequence{n}_zero{stage}": Layout(stage, sequence=n) for n in (2, 4) for stage in range(4)},
    **{f"sequence2_expert2_zero{s}": Layout(s, sequence=2, expert=2) for s in (1, 3)},
    **{f"tensor2_sequence2_zero{stage}": Layout(stage, tensor=2, sequence=2) for stage in (1, 3)},
    # The loss in chunks that do not divide the vocabulary evenly.
    **{f"chunked_zero{stage}": Layout(stage, loss_chunk=48) for stage in range(4)},
    **{f"chunked_pipe2_zero{stage}": Layout(stage, 2, loss_chunk=48) for stage in (0, 1)},
    **{f"chunked_tensor2_zero{s}": Layout(s, tensor=2, loss_chunk=48) for s in (1, 3)},
    **{f"chunked_sequence2_zero{s}": Layout(s, sequence=2, loss_chunk=48) for s in (1, 3)},
    **{
        f"{name}_zero{stage}": Layout(stage, model=keys)
        for name, keys in RECOMPUTED.items()
        for stage in range(4)
    },
    **{f"{name}_pipe2_zero1": Layout(1, 2, model=keys) for name, keys in RECOMPUTED.items()},
    **{
        f"{name}{way}": replace(layout, model={"attention": name, **sizes})
        for name, sizes in KINDS.items()
        for way, layout in {
            "_zero3": Layout(3),
            "_pipe2_zero1": Layout(1, 2),
            "_tensor2_zero1": Layout(1, tensor=2),
            "_sequence2_zero1": Layout(1, sequence=2),
        }.items()
    },
    **{
        f"{name}_{axis}2_zero{stage}": Layout(stage, **{axis: 2}, model=keys)  # type: ignore[arg-type]
        for name, keys in RECOMPUTED.items()
        for axis in ("tensor", "sequence")
        for stage in (1, 3)
    },
    **{f"reversible_zero{stage}": Layout(stage, model=_REVERSIBLE) for stage in range(4)},
    **{
        f"reversible_{axis}2_zero{stage}": Layout(stage, **{axis: 2}, model=_REVERSIBLE)  # type: ignore[arg-type]
        for axis in ("tensor", "sequence")
        for stage in (1, 3)
    },
}


class Divided:
    """A global batch, divided over a layout's ranks."""

    layout: str
    ranks: int
    accumulation: int

    @property
    def how(self) -> Layout:
        """The layout that the name stands for."""
        return LAYOUTS[self.layout]

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different samples."""
        return self.ranks // (self.how.pipeline * self.how.tensor * self.how.sequence)

    @property
    def micro_batch(self) -> int:
        """Samples in one micro-batch."""
        return GLOBAL_BATCH // (self.accumulation * self.data_ranks)


def covering(candidates: Iterable[C], covers: Callable[[C], set[Any]]) -> list[C]:
    """Return a small set of cells that covers everything that the candidates cover.

    Greedy: repeatedly take the cell that covers most of the uncovered properties.
    """
    covered_by = {cell: covers(cell) for cell in candidates}
    uncovered = set().union(*covered_by.values())
    chosen = []
    while uncovered:
        best = max(covered_by, key=lambda cell: len(covered_by[cell] & uncovered))
        chosen.append(best)
        uncovered -= covered_by[best]
    return chosen
