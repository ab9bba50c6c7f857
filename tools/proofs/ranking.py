"""Likeness of two rankings of the same things."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Kendall's tau-a of two lists of scores: 1 where every pair is in the same order, -1
    where none is; a pair that is equal in either counts for neither.
    """
    pairs = [*combinations(zip(one, other, strict=True), 2)]
    signs = (_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in pairs)
    return sum(signs) / len(pairs) if pairs else 1.0


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)
