"""The runs whose model states are measured."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from harness.layout.grid import Axis
from tools.proofs.cells import Divided, Sizes

SEQ_LEN = 16  # tokens
RANKS = 2
LAYOUTS = (
    *("zero0", "zero1", "zero2", "zero3"),
    *("zero1_offload", "zero2_offload", "zero3_offload_states", "zero3_offload", "zeropp"),
    *("tensor_zero0", "tensor_zero1", "tensor_tied_zero1", "tensor_zero3"),
    *("sequence_zero1", "sequence_zero2", "sequence_zero3", "pipe2_zero0", "pipe2_zero1"),
)
_HALVES = ("bf16_states", "bf16_states_fp32_sums")
PRECISIONS = ("fp32", "bf16", "bf16_fp32_sums", "fp16", "fp16_fp32_sums", *_HALVES)
ACCUMULATIONS = (1, 4)
_SIZES = Sizes(bucket=20_000, live=100_000, sub_group=60_000, persistence=100)


@dataclass(frozen=True)
class Case(Divided):
    """One combination; `accumulation` is micro-batches per rank and optimizer step."""

    layout: str
    precision: str
    accumulation: int
    optimizer: str = "adamw"
    ranks: ClassVar[int] = RANKS

    @property
    def name(self) -> str:
        """Name of the case in tables and files."""
        parts = asdict(self)
        if self.optimizer == "adamw":
            del parts["optimizer"]
        return "-".join(str(value) for value in parts.values())

    @property
    def label(self) -> str:
        """Label of the case on a terminal."""
        return f"measured {self.name}"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        """Return what `asdict` gave as JSON."""
        return cls(**values)

    @property
    def axis(self) -> Axis:
        """Axis along which the ranks differ: "data", or the axis of the layout."""
        if self.layout.startswith("tensor"):
            return "tensor"
        if self.layout.startswith("sequence"):
            return "sequence"
        return "pipeline" if self.how.pipeline > 1 else "data"

    @property
    def model_overrides(self) -> dict[str, Any]:
        """Overrides of models.MEASURED."""
        return {"tie_word_embeddings": True} if "tied" in self.layout else {}

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed JSON of this case, before it is resolved."""
        return self.how.json(self.precision, _SIZES, {"initial_scale_power": 4})


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
    precisions = {name: {*PRECISIONS} for name in LAYOUTS}
    precisions |= {name: {*PRECISIONS} - {*_HALVES} for name in LAYOUTS if "offload" in name}
    precisions |= {
        name: {"fp32", "bf16"} for name in LAYOUTS if name.startswith(("tensor", "sequence"))
    }
    precisions |= {
        "zero0": {"fp32"},
        "zero1": {*PRECISIONS} - {"bf16_states_fp32_sums"},
        "pipe2_zero0": {"fp32", "bf16"},
        "pipe2_zero1": {*PRECISIONS} - {"fp16_fp32_sums", *_HALVES},
        "tensor_zero0": {"fp32"},
    }
    combinations = itertools.product(LAYOUTS, PRECISIONS, ACCUMULATIONS)
    cases = [Case(*values) for values in combinations if values[1] in precisions[values[0]]]
    return cases + _OPTIMIZERS


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
        Case("zero3_offload_states", "fp16", 1),
        Case("zero3_offload", "bf16", 4),
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
        Case("pipe2_zero0", "bf16", 4),
        Case("pipe2_zero1", "fp32", 1),
        Case("pipe2_zero1", "bf16_fp32_sums", 4),
        *(case for case in _OPTIMIZERS if case.optimizer in ("adagrad", "muon")),
    ]
