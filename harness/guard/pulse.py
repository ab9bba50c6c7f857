"""Where a rank is: its phase and step, since when, and how long each phase usually takes."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass

_KNOWN_AFTER = 3  # times of a kind; the first compile, allocate and fill caches
_REMEMBERED = 32


@dataclass(frozen=True)
class Beat:
    """One sign of progress. `count`: how many came before it, on every rank the same at the same
    place of the loop.
    """

    phase: str
    step: int
    count: int
    since: float  # time.monotonic()


@dataclass(frozen=True)
class Limits:
    """After how many seconds without progress a rank counts as hanging.

    `first_s` for a phase that was seen less than three times, then `factor` times the longest of
    the last ones, but at least `floor_s`.
    """

    floor_s: float
    factor: float
    first_s: float


class Pulse:
    """Beaten by the thread that trains, whenever another phase begins; others only read."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.beat = Beat("set-up", 0, 0, time.monotonic())
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def __call__(self, phase: str, step: int) -> None:
        """`phase` begins, and with it the one before has ended."""
        now, before = time.monotonic(), self.beat
        self._seconds[before.phase].append(now - before.since)
        self.beat = Beat(phase, step, before.count + 1, now)

    def longest_s(self, phase: str) -> float | None:
        """The longest of the last times of its kind; None before it was seen."""
        return max(self._seconds[phase], default=None) if phase in self._seconds else None

    def limit_s(self, phase: str) -> float:
        """What is too long for it."""
        seen = self._seconds.get(phase, ())
        if len(seen) < _KNOWN_AFTER:
            return self.limits.first_s
        return max(self.limits.floor_s, self.limits.factor * max(seen))
