"""Axes of a sweep's plots: values to places and ticks. Standard library alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.sweeps.space import Dimension, Values

_MOST_TICKS = 6


@dataclass(frozen=True)
class Axis:
    """An axis from 0 to 1."""

    name: str
    low: float
    high: float
    log: bool = False
    words: tuple[str, ...] = ()
    """Categories, one step apart; empty for numbers."""

    @classmethod
    def of(cls, name: str, dimension: Dimension) -> Axis:
        """Return the axis of a key that is searched."""
        if isinstance(dimension, Values):
            return cls(name, -0.5, len(dimension.values) - 0.5, words=dimension.values)
        return cls(name, dimension.from_, dimension.to, dimension.log)

    @classmethod
    def over(cls, name: str, numbers: Sequence[float]) -> Axis:
        """Return an axis that shows some numbers, with room at both ends."""
        low, high = min(numbers, default=0.0), max(numbers, default=1.0)
        room = (high - low or abs(high) or 1.0) * 0.06
        return cls(name, low - room, high + room)

    def place(self, value: str | float) -> float:
        """Return the place of a value, 0 to 1."""
        number = float(self.words.index(str(value))) if self.words else float(value)
        if self.log:
            return math.log(number / self.low) / math.log(self.high / self.low)
        return (number - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return places and their labels."""
        if self.words:
            return [(self.place(word), word) for word in self.words]
        numbers = self._powers() if self.log else self._round_numbers()
        return [(self.place(number), f"{number:,.6g}") for number in numbers]

    def _powers(self) -> list[float]:
        first, last = (
            math.ceil(math.log10(self.low) - 1e-9),
            math.floor(math.log10(self.high) + 1e-9),
        )
        apart = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
        powers = [10.0**power for power in range(first, last + 1, apart)]
        return powers if len(powers) > 1 else [self.low, self.high]

    def _round_numbers(self) -> list[float]:
        rough = (self.high - self.low) / (_MOST_TICKS - 1)
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
