"""A size that is known to lie between two others."""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """Bytes, at least and at most."""

    low: int
    high: int

    def plus(self, other: Interval) -> Interval:
        """Return the sum of two sizes that have nothing to do with each other."""
        return Interval(self.low + other.low, self.high + other.high)

    @property
    def middle(self) -> float:
        """The mean of both ends."""
        return (self.low + self.high) / 2
