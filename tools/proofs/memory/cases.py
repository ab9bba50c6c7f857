"""The runs whose model states are measured: layouts, precisions, accumulation."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from harness.layout.grid import Axis

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 250,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SEQ_LEN = 16  # tokens
RANKS = 2

# Buckets and thresholds scaled down with the model, as in a large run.
_SIZES = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
_LIVE = {
    "stage3_param_persistence_threshold": 100,
    "stage3_prefetch_bucket_size": 20_000,
    "stage3_max_live_parameters": 100_000,
    "stage3_max_reuse_distance": 100_000,
    "sub_group_size": 60_000,
}
_CPU = {"device": "cpu"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1, **_SIZES},
    "zero2": {"stage": 2, **_SIZES},
    "zero3": {"stage": 3, **_SIZES, **_LIVE},
    "zero1_offload": {"stage": 1, **_SIZES, "offload_optimizer": _CPU},
    "zero2_offload": {"stage": 2, **_SIZES, "offload_optimizer": _CPU},
    "zero3_offload": {"stage": 3, **_SIZES, **_LIVE, "offload_optimizer": _CPU},
    "zero3_offload_all": {
        "stage": 3,
        **_SIZES,
        **_LIVE,
        "offload_optimizer": _CPU,
        "offload_param": _CPU,
    },
    "zeropp": {"stage": 3, **_SIZES, **_LIVE, "zero_hpz_partition_size": RANKS},
    # Of which the harness trains none: DeepSpeed by itself.
    "tensor_zero0": {"stage": 0},
    "tensor_zero1": {"stage": 1, **_SIZES},
    "tensor_tied_zero1": {"stage": 1, **_SIZES},
    "tensor_zero3": {"stage": 3, **_SIZES, **_LIVE},
    "sequence_zero1": {"stage": 1, **_SIZES},
    "sequence_zero2": {"stage": 2, **_SIZES},
    "sequence_zero3": {"stage": 3, **_SIZES, **_LIVE},
    "pipeline_zero0": {"stage": 0},
    "pipeline_zero1": {"stage": 1, **_SIZES},
}
_FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16_fp32_sums": {"bf16": {"enabled": True}, **_FP32_SUMS},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "fp16_fp32_sums": {"fp16": {"enabled": True, "initial_scale_power": 4}, **_FP32_SUMS},
}
_BF16_STATES = {
    "bf16": {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }
}
PRECISIONS |= {
    "bf16_states": _BF16_STATES,
    "bf16_states_fp32_sums": {**_BF16_STATES, **_FP32_SUMS},
}
_HALVES = {"bf16_states", "bf16_states_fp32_sums"}
ACCUMULATIONS = (1, 4)


@dataclass(frozen=True)
class Case:
    """One combination; `accumulation` is micro-batches per rank and optimizer step."""

    layout: str
    precision: str
    accumulation: int
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        """How tables and files call it."""
        parts = asdict(self)
        if self.optimizer == "adamw":
            del parts["optimizer"]
        return "-".join(str(value) for value in parts.values())

    @property
    def axis(self) -> Axis:
        """What the ranks differ in: "data", or what the layout divides over them."""
        first = self.layout.partition("_")[0]
        return first if first in ("pipeline", "tensor", "sequence") else "data"  # type: ignore[return-value]

    @property
    def model_overrides(self) -> dict[str, Any]:
        """What differs from MODEL."""
        return {"tie_word_embeddings": True} if "tied" in self.layout else {}

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed JSON of this case, before it is resolved."""
        sections: dict[str, Any] = {
            "pipeline": {"pipeline": {"stages": RANKS}},
            "tensor": {"tensor_parallel": {"autotp_size": RANKS}},
            "sequence": {"sequence_parallel_size": RANKS},
        }
        return {
            "zero_optimization": LAYOUTS[self.layout],
            **sections.get(self.axis, {}),
            **PRECISIONS[self.precision],
        }


_OPTIMIZERS = [
    Case("zero0", "fp32", 1, "adafactor"),
    Case("zero1", "bf16_fp32_sums", 1, "muon"),
    Case("zero2", "fp32", 4, "adagrad"),
    Case("zero2_offload", "bf16", 1, "lion"),
    Case("zero3", "fp32", 1, "muon"),
    Case("zero3", "bf16_fp32_sums", 1, "lion"),
    Case("zero1", "fp32", 1, "momentum"),
    Case("zero2", "bf16", 1, "sgd"),
    Case("zero2", "bf16", 1, "adam8bit"),
]


def all_cases() -> list[Case]:
    """Every combination that the harness runs: not most of stage 0 in half precision, which it
    runs as stage 1.
    """
    runs = {
        "zero0": {"fp32"},
        "pipeline_zero0": {"fp32", "bf16"},
        "pipeline_zero1": PRECISIONS.keys() - {"fp16_fp32_sums", *_HALVES},
        **{name: PRECISIONS.keys() - _HALVES for name in LAYOUTS if "offload" in name},
        "zero1": PRECISIONS.keys() - {"bf16_states_fp32_sums"},
        "tensor_zero0": {"fp32"},
        **{
            name: {"fp32", "bf16"}
            for name in LAYOUTS
            if name.startswith(("tensor", "sequence")) and name != "tensor_zero0"
        },
    }
    return [
        Case(layout, precision, accumulation)
        for layout, precision, accumulation in itertools.product(LAYOUTS, PRECISIONS, ACCUMULATIONS)
        if precision in runs.get(layout, PRECISIONS)
    ] + _OPTIMIZERS


def covering_cases() -> list[Case]:
    """A small set with every layout, precision, accumulation and optimizer class."""
    return [
        Case("zero0", "fp32", 4),
        Case("zero1", "fp32", 1),
        Case("zero1", "bf16_fp32_sums", 4),
        Case("zero1", "fp16_fp32_sums", 1),
        Case("zero2", "bf16", 4),
        Case("zero2", "fp16_fp32_sums", 4),
        Case("zero3", "fp32", 4),
        Case("zero3", "bf16_fp32_sums", 1),
        Case("zero1_offload", "bf16_fp32_sums", 1),
        Case("zero2_offload", "bf16", 4),
        Case("zero3_offload", "fp16", 1),
        Case("zero3_offload_all", "bf16", 4),
        Case("zeropp", "fp16", 4),
        Case("zero2", "bf16_states_fp32_sums", 4),
        Case("zero3", "bf16_states", 1),
        Case("tensor_zero0", "fp32", 1),
        Case("tensor_zero1", "bf16", 4),
        Case("tensor_tied_zero1", "fp32", 1),
        Case("tensor_zero3", "bf16", 1),
        Case("sequence_zero1", "bf16", 1),
        Case("sequence_zero2", "fp32", 4),
        Case("sequence_zero3", "bf16", 4),
        Case("pipeline_zero0", "bf16", 4),
        Case("pipeline_zero1", "fp32", 1),
        Case("pipeline_zero1", "bf16_fp32_sums", 4),
        *(case for case in _OPTIMIZERS if case.optimizer in ("adagrad", "muon")),
    ]
