"""The layouts whose steps are timed: those that a site's rates are fitted to, and others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.layout.grid import axes_json

_CPU = {"device": "cpu", "pin_memory": False}
_OFFLOADED: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": _CPU},
    "all": {"offload_optimizer": _CPU, "offload_param": _CPU},
}
_SIZES = {"reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000}
_SIZES3 = {
    "reduce_bucket_size": 2_000_000,
    "stage3_prefetch_bucket_size": 2_000_000,
    "stage3_param_persistence_threshold": 2_000,
}
MODELS: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4},
    "wide": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4},
    "deep": {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 8},
}


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    ranks: int
    zero: int
    model: str
    micro_batch: int
    accumulation: int
    seq_len: int = 128
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    offload: str = "none"
    checkpointing: str = "none"

    @property
    def name(self) -> str:
        """The layout in a few words, a file's name."""
        sizes = {"pipeline": self.pipeline, "tensor": self.tensor, "sequence": self.sequence}
        words = [f"{self.ranks}-ranks", f"zero{self.zero}", self.model]
        words += [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        words += [f"offload-{self.offload}"] if self.offload != "none" else []
        words += [f"{self.checkpointing}-again"] if self.checkpointing != "none" else []
        return "-".join([*words, f"{self.micro_batch}x{self.accumulation}x{self.seq_len}"])

    @property
    def label(self) -> str:
        """Label of the case on a terminal."""
        return f"timed {self.name}"

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.ranks // (self.pipeline * self.tensor * self.sequence)

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed JSON."""
        sizes = _SIZES3 if self.zero == 3 else _SIZES if self.zero else {}
        section = {"stage": self.zero, **sizes, **_OFFLOADED[self.offload]}
        axes = axes_json(self.pipeline, self.tensor, self.sequence)
        return {"zero_optimization": section, **axes}

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return {
            "model_type": "llama",
            "vocab_size": 2048,
            "max_position_embeddings": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            **MODELS[self.model],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        """Return what `asdict` gave as JSON."""
        return cls(**values)


FITTED = (
    Case(1, 0, "small", 2, 2),
    Case(1, 0, "wide", 1, 1, 256),
    Case(2, 0, "small", 2, 2),
    Case(2, 1, "wide", 2, 1),
    Case(2, 2, "small", 1, 2),
    Case(2, 3, "small", 2, 2),
    Case(2, 3, "wide", 1, 1),
    Case(2, 1, "small", 2, 2, tensor=2),
    Case(2, 1, "small", 2, 2, sequence=2),
    Case(2, 0, "small", 2, 4, pipeline=2),
    Case(2, 2, "wide", 2, 1, offload="optimizer"),
    Case(2, 1, "small", 4, 1, checkpointing="full"),
    Case(4, 1, "small", 2, 2),
    Case(4, 3, "wide", 1, 1),
)
"""A site's rates are fitted to these."""
JUDGED = (
    Case(1, 0, "deep", 2, 1),
    Case(1, 0, "deep", 4, 2, checkpointing="full"),
    Case(2, 0, "deep", 2, 1),
    Case(2, 0, "wide", 4, 1),
    Case(2, 1, "deep", 2, 2),
    Case(2, 1, "deep", 4, 1, 64),
    Case(2, 1, "deep", 2, 2, checkpointing="full"),
    Case(2, 1, "wide", 1, 4, 256),
    Case(2, 2, "deep", 2, 1),
    Case(2, 2, "deep", 2, 4, offload="optimizer"),
    Case(2, 3, "deep", 2, 1),
    Case(2, 3, "deep", 4, 2),
    Case(2, 3, "wide", 2, 1, offload="all"),
    Case(2, 3, "deep", 2, 1, checkpointing="full"),
    Case(2, 1, "deep", 2, 1, tensor=2),
    Case(2, 3, "wide", 2, 1, tensor=2),
    Case(2, 1, "deep", 2, 2, sequence=2),
    Case(2, 3, "deep", 2, 1, sequence=2),
    Case(2, 1, "deep", 2, 4, pipeline=2),
    Case(2, 0, "wide", 1, 2, pipeline=2),
    Case(4, 1, "deep", 2, 1),
    Case(4, 2, "deep", 1, 2),
    Case(4, 3, "deep", 2, 1),
    Case(4, 1, "deep", 2, 2, pipeline=2),
    Case(4, 1, "deep", 2, 1, tensor=2),
)
"""And judged on these, none of which is one of them."""
