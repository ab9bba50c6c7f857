"""Finds steps whose loss or gradient norm jumps up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Smallest sigma, as a fraction of the mean; absolute for the logarithm of the norm. If nothing
# varies (one batch over and over), a rounding difference is no spike.
_LEAST_SIGMA = 1e-3
_TINY = 1e-30


@dataclass(frozen=True)
class Spike:
    """A step with an unusually high loss or gradient norm."""

    of: str
    """loss (nats) or log_grad_norm (natural logarithm); mean and sigma are in its unit."""
    value: float
    mean: float
    sigma: float


class SpikeDetector:
    """Compares every step with the steps before it.

    A spike is more than `sigmas` sample standard deviations above the mean of the last `window`
    steps that were none, as in OLMo-core's SkipStepOptimizer (6 over 128;
    github.com/allenai/OLMo-core, optim/skip_step_optimizer.py), where mean and deviation follow a
    falling loss. Steps that spiked stay out of the window, else one would hide the next.
    The norm is judged by its logarithm: it is positive and skewed, with heavier tails than a normal
    distribution (Simsekli et al., arXiv 1901.06053); on a linear scale, ordinary values would be
    called spikes every few thousand steps.

    No step is judged before a quarter of the window is filled. After a quarter of a window of
    spikes in a row, they are the new level: the window is emptied.
    """

    def __init__(self, sigmas: float, window: int) -> None:
        self.sigmas = sigmas
        self.enough = max(2, window // 4)
        self.seen: dict[str, deque[float]] = {
            "loss": deque(maxlen=window),
            "log_grad_norm": deque(maxlen=window),
        }
        self.in_a_row = 0

    def see(self, loss: float, grad_norm: float) -> Spike | None:
        """Judge one step, and add it to the window; ignore one that is not finite."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return None
        values = {"loss": loss, "log_grad_norm": math.log(max(grad_norm, _TINY))}
        spike = next(filter(None, map(self._judge, values, values.values())), None)
        self.in_a_row = self.in_a_row + 1 if spike else 0
        if self.in_a_row >= self.enough:
            self.restore({})
        elif spike is None:
            for of, value in values.items():
                self.seen[of].append(value)
        return spike

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` takes."""
        return {"in_a_row": self.in_a_row, **{of: list(seen) for of, seen in self.seen.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set a `state`; an empty one resets the detector."""
        self.in_a_row = state.get("in_a_row", 0)
        for of, seen in self.seen.items():
            seen.clear()
            seen.extend(state.get(of, ()))

    def _judge(self, of: str, value: float) -> Spike | None:
        seen = self.seen[of]
        if len(seen) < self.enough:
            return None
        mean, sigma = _mean_and_sigma(seen)
        sigma = max(sigma, _LEAST_SIGMA * (abs(mean) if of == "loss" else 1.0))
        return Spike(of, value, mean, sigma) if value > mean + self.sigmas * sigma else None


def _mean_and_sigma(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1))
