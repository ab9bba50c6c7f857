"""The table that every gate draws its cells from: layouts, precisions, accumulation, ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

GLOBAL_BATCH = 8  # samples

Json = dict[str, Any]
C = TypeVar("C")


@dataclass(frozen=True)
class Sizes:
    """Buckets and thresholds in elements, scaled down with the model: several buckets a step,
    parameters larger than a bucket, and ZeRO-3 that really partitions, as in a large run.
    """

    bucket: int
    live: int
    sub_group: int
    persistence: int
    """Parameters of fewer elements stay whole under ZeRO-3."""

    def section(self, stage: int) -> Json:
        """The keys of a stage's `zero_optimization` that depend on the model's size."""
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
    """Division of a model over ranks."""

    stage: int
    """Of ZeRO."""
    pipeline: int = 1
    """Stages of a pipeline."""
    more: Json = field(default_factory=dict)
    """Further keys of `zero_optimization`."""
    sections: Json = field(default_factory=dict)
    """Further sections of the JSON."""
    sized: bool = True
    """False leaves DeepSpeed its own buckets and thresholds."""
    has_bf16_states: bool = False
    """True if master weights and moments are in bf16."""
    bf16_sums: bool = False
    """True if bf16 gradients are summed in bf16."""
    compiled: bool = False
    """True if every decoder layer is compiled."""

    def json(self, precision: str, sizes: Sizes, scaling: Json) -> Json:
        """The DeepSpeed JSON before it is resolved. `scaling`: fp16's loss scale."""
        zero = {"stage": self.stage, **(sizes.section(self.stage) if self.sized else {})}
        stages = {"pipeline": {"stages": self.pipeline}} if self.pipeline > 1 else {}
        sections = {**stages, **self.sections, **precision_sections(precision, scaling)}
        return {"zero_optimization": {**zero, **self.more}, **sections}

    def sums_of(self, precision: str) -> str:
        """The precision in which a rank adds up the gradients of its micro-batches."""
        if self.pipeline > 1 and self.stage == 0:  # DeepSpeed has no other there
            return precision
        return "fp32" if precision == "bf16" and not self.bf16_sums else precision

    def full_precision(self, precision: str) -> str:
        """`precision` with its sums and states: a key of `precision_sections`."""
        if precision != "bf16":
            return precision
        sums = "_fp32_sums" if self.sums_of(precision) == "fp32" else ""
        return ("bf16_states" if self.has_bf16_states else "bf16") + sums


def precision_sections(precision: str, scaling: Json) -> Json:
    """The JSON's sections of fp32, bf16, bf16_states or fp16, each also with `_fp32_sums`."""
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
    "sub_group_size": 300_000,  # on two ranks all sub-groups but the last fill a file
    "offload_optimizer": {"device": "nvme", "nvme_path": "auto", "pin_memory": False},
    "offload_param": _CPU,
}
_TENSOR = {"tensor_parallel": {"autotp_size": 2}}
_SEQUENCE = {"sequence_parallel_size": 2}
LAYOUTS: dict[str, Layout] = {
    **{f"zero{stage}": Layout(stage) for stage in range(4)},
    "zero1_offload": Layout(1, more=_STATES),
    "zero2_offload": Layout(2, more=_STATES),
    "zero3_offload_states": Layout(3, more=_STATES),
    "zero3_offload": Layout(3, more=_ALL),
    # The second copy of the weights within each node of two ranks.
    "zeropp": Layout(3, more=_SECOND_COPY),
    "zero3_default": Layout(3, sized=False),  # everything so small stays whole on every rank
    "zero1_bf16_sums": Layout(1, bf16_sums=True),
    "zero3_bf16_sums": Layout(3, bf16_sums=True),
    "zero2_bf16_states": Layout(2, has_bf16_states=True),
    "zero3_bf16_states": Layout(3, has_bf16_states=True),
    "compiled_zero3": Layout(3, compiled=True),
    "compiled_zero1": Layout(1, compiled=True),
    # Only where DeepSpeed's reads and writes can be compiled (libaio).
    "zero3_nvme": Layout(3, more=_ON_NVME),
    **{f"pipe{n}_zero{stage}": Layout(stage, n) for n in (2, 4) for stage in (0, 1)},
    # Of which the harness trains none: DeepSpeed by itself.
    **{f"tensor_{name}": Layout(int(name[-1]), sections=_TENSOR) for name in ("zero0", "zero1")},
    "tensor_tied_zero1": Layout(1, sections=_TENSOR),
    "tensor_zero3": Layout(3, sections=_TENSOR),
    **{f"sequence_zero{stage}": Layout(stage, sections=_SEQUENCE) for stage in (1, 2, 3)},
}


class Divided:
    """What a layout on so many ranks makes of a global batch."""

    layout: str
    ranks: int
    accumulation: int

    @property
    def how(self) -> Layout:
        """The layout that the name stands for."""
        return LAYOUTS[self.layout]

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.ranks // self.how.pipeline

    @property
    def micro_batch(self) -> int:
        """Samples in one micro-batch."""
        return GLOBAL_BATCH // (self.accumulation * self.data_ranks)


def covering(candidates: Iterable[C], covers: Callable[[C], set[Any]]) -> list[C]:
    """Return a small set of cells that covers everything that the candidates do.

    Greedy: take the cell that covers most of what is still uncovered, until nothing is left.
    """
    covered_by = {cell: covers(cell) for cell in candidates}
    uncovered = set().union(*covered_by.values())
    chosen = []
    while uncovered:
        best = max(covered_by, key=lambda cell: len(covered_by[cell] & uncovered))
        chosen.append(best)
        uncovered -= covered_by[best]
    return chosen
