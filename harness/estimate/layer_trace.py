"""Bytes that the layers of an architecture keep, where its own class was traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["traced", "traced through reference code", "traced with kernels"]
"""How layers were traced that carry a state: through transformers' reference code, or as if with
the kernels of another package, from what their sources keep (models/state_kernels.py)."""
BY_REFERENCE: Way = "traced through reference code"
WITH_KERNELS: Way = "traced with kernels"


@dataclass(frozen=True)
class LayerTrace:
    """Traced bytes that are kept of a token."""

    layers: tuple[float, ...]
    """Of each of the model's layers."""
    outside: float = 0.0
    """Outside the layers, all logits included."""
    way: Way = "traced"
