"""The runs whose model states are measured."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from harness.layout.grid import Axis
from tests.gates.cells import RECOMPUTED, Divided, Sizes

SEQ_LEN = 16  # tokens
LAYOUTS = (
    *("zero0", "zero1", "zero2", "zero3"),
    *("zero1_offload", "zero2_offload", "zero3_offload_states", "zero3_offload", "zeropp"),
    *("tensor2_zero0", "tensor2_zero1", "tensor2_zero2", "tensor2_zero3", "tensor2_tied_zero1"),
    *("sequence2_zero1", "sequence2_zero2", "sequence2_zero3", "pipe2_zero0", "pipe2_zero1"),
    *("pipe2_tensor2_zero0", "pipe2_tensor2_zero1"),
    *("expert2_zero1", "expert2_zero2", "expert2_zero3"),
    *("tensor2_expert2_zero1", "tensor2_expert2_zero3"),
    *("varlen_tensor2_zero1", "varlen_sequence2_zero1"),
    *(f"{name}_zero{stage}" for name in RECOMPUTED for stage in (1, 2, 3)),
    *(f"reversible_zero{stage}" for stage in (1, 2, 3)),
    *("chunked_zero1", "chunked_zero3", "chunked_pipe2_zero1"),
    *("chunked_tensor2_zero1", "chunked_sequence2_zero1"),
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

    @property
    def ranks(self) -> int:  # type: ignore[override]
        """Two, or as many as share one model; divided experts also need replicas."""
        return max(2, self.how.pipeline * self.how.tensor, 2 * self.how.expert * self.is_mixture)

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
        """Return the case from the JSON of `asdict`."""
        return cls(**values)

    @property
    def axis(self) -> Axis:
        """Axis along which the ranks differ: "data", or the axis of the layout."""
        if self.how.pipeline > 1:
            return "pipeline"
        if self.how.tensor > 1:
            return "tensor"
        return "sequence" if self.how.sequence > 1 else "data"

    @property
    def model(self) -> str:
        """Name of the model's file."""
        return "mixture.json" if self.is_mixture else "config.json"

    @property
    def is_mixture(self) -> bool:
        """True if the experts are divided."""
        return self.how.expert > 1

    @property
    def model_keys(self) -> dict[str, Any]:
        """Additional keys of the run config's model section; overrides apply to models.MEASURED."""
        tied = {"tie_word_embeddings": True} if "tied" in self.layout else {}
        return {"overrides": tied, "loss_chunk": self.how.loss_chunk, **self.how.model}

    @property
    def counts_saved(self) -> bool:
        """True if bytes saved for the backward pass are also counted."""
        chunked = self.how.loss_chunk and self.how.pipeline == 1
        return self.is_divided or bool(self.how.model or chunked)

    @property
    def is_divided(self) -> bool:
        """True if tensors, rows or experts are divided."""
        return self.axis in ("tensor", "sequence") or self.is_mixture

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
    """Return every combination that the harness runs; most of stage 0 in half precision is left
    out, since it runs as stage 1.
    """
    precisions = {name: {*PRECISIONS} for name in LAYOUTS}
    precisions |= {name: {*PRECISIONS} - {*_HALVES} for name in LAYOUTS if "offload" in name}
    precisions |= {
        name: {"fp32", "bf16"}
        for name in LAYOUTS
        if name.startswith(("tensor", "sequence", "varlen", "chunked"))
    }
    precisions |= {
        f"expert2_zero{stage}": {"fp32", "bf16", "bf16_fp32_sums"} for stage in (1, 2, 3)
    }
    again = (*RECOMPUTED, "reversible")
    precisions |= {name: {"fp32", "bf16"} for name in LAYOUTS if name.startswith(again)}
    precisions |= {
        "zero0": {"fp32"},
        "zero1": {*PRECISIONS} - {"bf16_states_fp32_sums"},
        "pipe2_zero0": {"fp32", "bf16"},
        "pipe2_zero1": {*PRECISIONS} - {"fp16_fp32_sums", *_HALVES},
        "tensor2_zero0": {"fp32"},
        "pipe2_tensor2_zero0": {"fp32", "bf16"},
        "pipe2_tensor2_zero1": {"fp32", "bf16", "bf16_fp32_sums"},
    }
    combinations = itertools.product(LAYOUTS, PRECISIONS, ACCUMULATIONS)
    cases = [Case(*values) for values in combinations if values[1] in precisions[values[0]]]
    return cases + _OPTIMIZERS


_COVERING = """
    zero0-fp32-4 zero1-fp32-1 zero1-bf16_fp32_sums-4 zero1-fp16_fp32_sums-1 zero2-bf16-4
    zero2-fp16_fp32_sums-4 zero3-fp32-4 zero3-bf16_fp32_sums-1 zero1_offload-bf16_fp32_sums-1
    zero2_offload-bf16-4 zero3_offload_states-fp16-1 zero3_offload-bf16-4 zeropp-fp16-4
    zero2-bf16_states_fp32_sums-4 zero3-bf16_states-1 tensor2_zero0-fp32-1 tensor2_zero1-bf16-4
    tensor2_zero2-bf16-1 tensor2_tied_zero1-fp32-1 tensor2_zero3-bf16-1 sequence2_zero1-bf16-1
    sequence2_zero2-fp32-4 sequence2_zero3-bf16-4 varlen_tensor2_zero1-bf16-1
    varlen_sequence2_zero1-fp32-4 expert2_zero1-bf16-1 expert2_zero2-fp32-4 expert2_zero3-bf16-1
    tensor2_expert2_zero1-bf16-1 tensor2_expert2_zero3-fp32-1 chunked_zero1-bf16-4
    chunked_zero3-bf16-1 chunked_pipe2_zero1-fp32-4 chunked_tensor2_zero1-fp32-1
    chunked_sequence2_zero1-bf16-1 pipe2_zero0-bf16-4 pipe2_zero1-fp32-1
    pipe2_zero1-bf16_fp32_sums-4 pipe2_tensor2_zero0-bf16-4 pipe2_tensor2_zero1-fp32-1
    pipe2_tensor2_zero1-bf16_fp32_sums-4 full_zero1-bf16-4 full_zero2-fp32-1 full_zero3-bf16-4
    every2_zero1-fp32-1 every2_zero2-bf16-4 every2_zero3-fp32-1 selective_zero1-bf16-4
    selective_zero2-fp32-1 selective_zero3-bf16-1 offloaded_zero1-fp32-1 offloaded_zero2-bf16-4
    offloaded_zero3-bf16-1 tiled_zero1-bf16-1 tiled_zero2-fp32-4 tiled_zero3-bf16-4
    reversible_zero1-fp32-4 reversible_zero2-bf16-1 reversible_zero3-bf16-4 all_zero1-fp32-4
    all_zero2-bf16-1 all_zero3-fp32-4
"""


def covering_cases() -> list[Case]:
    """Return a small set with every layout, precision, accumulation and optimizer class."""
    by_name = {case.name: case for case in all_cases()}
    optimizers = [case for case in _OPTIMIZERS if case.optimizer in ("adagrad", "muon")]
    return [by_name[name] for name in _COVERING.split()] + optimizers
