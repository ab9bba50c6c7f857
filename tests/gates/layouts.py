"""Layouts: how a model is distributed over ranks, named by words such as `varlen_tensor2_zero1`."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass, field
from typing import Any

from harness.config.sections import NEXT_TOKEN
from harness.layout.grid import axes_json
from tests.tables import beside

Json = dict[str, Any]


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
    whole_residuals: bool = False
    """True if tensor-parallel ranks do not divide the residual stream."""
    compiled: bool = False
    """True if every decoder layer is compiled."""
    varlen: bool = False
    """True if document bounds separate documents instead of a mask."""
    loss_chunk: int = 0
    """Vocabulary entries whose logits the loss holds at a time; 0 for all."""
    objective: str = NEXT_TOKEN
    """train.objective."""
    model: Json = field(default_factory=dict)
    """Additional keys of the run config's model section."""

    @staticmethod
    @functools.cache
    def named(name: str) -> Layout:
        """Return the layout of a name: words of HOW, axes with their sizes, then a key of ENDS.

        Raises KeyError for any other word.
        """
        head, _, tail = name.partition("zero")
        fields: Json = dict(ENDS[f"zero{tail}"])
        for word in filter(None, head.split("_")):
            axis = AXES.get(word[:-1])
            fields |= {axis: int(word[-1])} if axis else HOW[word]
        return Layout(**fields)

    @property
    def kind(self) -> str:
        """Name of an approximate attention; "" for exact attention."""
        return str(self.model.get("attention", ""))

    def json(self, precision: str, sizes: Sizes, scaling: Json) -> Json:
        """Return the DeepSpeed JSON before it is resolved; `scaling` is fp16's loss scale."""
        zero = {"stage": self.stage, **(sizes.section(self.stage) if self.sized else {})}
        axes = axes_json(self.pipeline, self.tensor, self.sequence, self.expert)
        if self.whole_residuals:
            axes["tensor_parallel"]["sequence_parallel"] = False
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
    """Return the JSON's sections for a precision, also with `_fp32_sums`."""
    kind = precision.removesuffix("_fp32_sums")
    dtype = kind.removesuffix("_states")
    keys: Json = {"enabled": True, **(scaling if dtype == "fp16" else {})}
    if kind == "bf16_states":
        keys |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    sums = {} if kind == precision else {"data_types": {"grad_accum_dtype": "fp32"}}
    return sums | ({} if dtype == "fp32" else {dtype: keys})


def names(patterns: str) -> list[str]:
    """Return names from patterns: "tensor{2,4}_zero1 zeropp" stands for three."""
    split = (re.split(r"[{}]", pattern) for pattern in patterns.split())
    choices = ([part.split(",") for part in parts] for parts in split)
    return ["".join(name) for parts in choices for name in itertools.product(*parts)]


AXES = {"pipe": "pipeline", "tensor": "tensor", "sequence": "sequence", "expert": "expert"}
_TABLES = beside(__file__, "layouts.toml")
RECOMPUTED: dict[str, Json] = _TABLES["recomputed"]
"""Recomputed or host-offloaded activations."""
KINDS: dict[str, Json] = _TABLES["kinds"]
"""Approximate kinds of attention."""
HOW: dict[str, Json] = {
    **_TABLES["how"],
    **{name: {"model": keys} for name, keys in RECOMPUTED.items()},
    **{name: {"model": {"attention": name, **sizes}} for name, sizes in KINDS.items()},
}
"""Words of a name that change what each rank computes."""
ENDS: dict[str, Json] = _TABLES["ends"]
"""ZeRO's stages with their options."""
