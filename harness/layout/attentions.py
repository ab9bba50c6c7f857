"""The attention implementations: a row for each value of model.attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """An implementation, by its Hugging Face name."""

    package: str | None = None
    """The package that brings it, for GPUs alone."""
    masks_one_sequence: bool = False
    """True if it keeps documents apart in micro-batches of one sequence only."""
    is_traced: bool = False
    """True if its saved activations were compared with a trace."""


ATTENTIONS = {
    "sdpa": Attention(is_traced=True),
    "eager": Attention(is_traced=True),
    "flash_attention_2": Attention("flash_attn", masks_one_sequence=True),
    "flash_attention_3": Attention("flash_attn_3", masks_one_sequence=True),
}
