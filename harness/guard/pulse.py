"""The pulse of a rank: its phase and step, since when, and the usual duration of each phase."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass

_ENOUGH = 3  # durations; the first ones include compiling, allocating, filling caches
_REMEMBERED = 32


@dataclass(frozen=True)
class Beat:
    """One sign of progress. `count`: number of earlier beats, equal on all ranks at one place of
    the loop.
    """

    phase: str
    step: int
    count: int
    since: float  # time.monotonic()


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a rank counts as hanging.

    `first_s` for a phase with fewer than three durations; then `factor` times the longest of the
    last ones, but at least `floor_s`.
    """

    floor_s: float
    factor: float
    first_s: float


class Pulse:
    """Written by the training thread at the begin of each phase; other threads only read."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.beat = Beat("set-up", 0, 0, time.monotonic())
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def __call__(self, phase: str, step: int) -> None:
        """Begin `phase`, and end the one before."""
        now, before = time.monotonic(), self.beat
        self._seconds[before.phase].append(now - before.since)
        self.beat = Beat(phase, step, before.count + 1, now)

    def longest_s(self, phase: str) -> float | None:
        """Return the longest of a phase's last durations; None before the first."""
        return max(self._seconds[phase], default=None) if phase in self._seconds else None

    def limit_s(self, phase: str) -> float:
        """Return the seconds after which a phase counts as hanging."""
        durations = self._seconds.get(phase, ())
        if len(durations) < _ENOUGH:
            return self.limits.first_s
        return max(self.limits.floor_s, self.limits.factor * max(durations))
