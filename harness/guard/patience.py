"""Patience: ends a run early once its held-out loss stops falling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Patience:
    """Counts evaluations since the best one; over after `limit` of them, never for 0."""

    def __init__(self, limit: int, least: float) -> None:
        self._limit = limit
        self._least = least  # nats
        self.best, self.best_step = math.inf, 0
        self._since = 0

    def see(self, loss: float, step: int) -> None:
        """Note the held-out loss after a step; an improvement is one of more than `least` nats."""
        if loss < self.best - self._least:
            self.best, self.best_step, self._since = loss, step, 0
        else:
            self._since += 1

    @property
    def is_over(self) -> bool:
        """True after `limit` evaluations without improvement."""
        return 0 < self._limit <= self._since

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        best = self.best if math.isfinite(self.best) else None
        return {"best": best, "best_step": self.best_step, "since": self._since}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set a `state` from a checkpoint; missing values are reset."""
        best = state.get("best")
        self.best = math.inf if best is None else best
        self.best_step, self._since = state.get("best_step", 0), state.get("since", 0)
