"""Judges the losses of a run: spikes, divergence, and patience for the held-out loss."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from harness.config.sections import EvalConfig, GuardConfig
from harness.errors import ExitCode
from harness.files.paths import script

# Smallest sigma, as a fraction of the mean; absolute for the logarithm of the norm. It keeps
# rounding differences from counting as spikes if nothing varies (the same batch again and again).
_LEAST_SIGMA = 1e-3
_TINY = 1e-30


@dataclass(frozen=True)
class Spike:
    """A step with an unusually high loss or gradient norm."""

    quantity: str
    """loss (nats) or log_grad_norm (natural logarithm); mean and sigma are in its unit."""
    value: float
    mean: float
    sigma: float


class SpikeDetector:
    """Compares every step with the steps before it.

    A spike is more than `sigmas` sample standard deviations above the mean of the last `window`
    steps without spikes, as in OLMo-core's SkipStepOptimizer (6 over 128;
    github.com/allenai/OLMo-core, optim/skip_step_optimizer.py); mean and deviation follow a falling
    loss. Spikes are not added to the window, otherwise one would hide the next. The norm is judged
    by its logarithm: it is positive and skewed, with heavier tails than a normal distribution
    (Simsekli et al., arXiv 1901.06053), so that on a linear scale ordinary values would be spikes
    every few thousand steps.

    No step is judged until a quarter of the window is filled. After a quarter of a window of
    consecutive spikes, these are taken as the new level, and the window is emptied.
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
        """Judge a step and add it to the window; a step that is not finite is ignored."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return None
        values = {"loss": loss, "log_grad_norm": math.log(max(grad_norm, _TINY))}
        spike = next(filter(None, map(self._judge, values, values.values())), None)
        self.in_a_row = self.in_a_row + 1 if spike else 0
        if self.in_a_row >= self.enough:
            self.restore({})
        elif spike is None:
            for name, value in values.items():
                self.seen[name].append(value)
        return spike

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {"in_a_row": self.in_a_row, **{name: list(seen) for name, seen in self.seen.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; an empty one resets the detector."""
        self.in_a_row = state.get("in_a_row", 0)
        for name, seen in self.seen.items():
            seen.clear()
            seen.extend(state.get(name, ()))

    def _judge(self, name: str, value: float) -> Spike | None:
        seen = self.seen[name]
        if len(seen) < self.enough:
            return None
        mean, sigma = _mean_and_sigma(seen)
        sigma = max(sigma, _LEAST_SIGMA * (abs(mean) if name == "loss" else 1.0))
        return Spike(name, value, mean, sigma) if value > mean + self.sigmas * sigma else None


def _mean_and_sigma(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1))


class Patience:
    """Counts evaluations since the best one; is over after `limit` of them, or never if it is 0."""

    def __init__(self, limit: int, least: float) -> None:
        self._limit = limit
        self._least = least  # nats
        self.best, self.best_step = math.inf, 0
        self._since = 0

    def see(self, loss: float, step: int) -> None:
        """Record the held-out loss after a step; an improvement must exceed `least` nats."""
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
        """Restore a `state` from a checkpoint; missing values are reset."""
        best = state.get("best")
        self.best = math.inf if best is None else best
        self.best_step, self._since = state.get("best_step", 0), state.get("since", 0)


ADVICE = "resume from an earlier checkpoint in a new run.dir with a lower optim.lr"


class Next(Enum):
    """What a run does after a step."""

    GO_ON = auto()
    END_EARLY = auto()
    ROLL_BACK = auto()
    STOP = auto()


@dataclass(frozen=True)
class Verdict:
    """The decision on a run after a step."""

    next: Next = Next.GO_ON
    message: str = ""
    code: ExitCode = ExitCode.DONE
    """Exit code of a run that stops."""
    is_written: bool = False
    """True once all ranks have written the pending checkpoint."""


class StabilityMonitor:
    """Judges a run by its losses, norms and evaluations; does not change it.

    Its `state` is in every checkpoint, so that a resumed run is judged like the run that saved it.
    Ranks with the same inputs reach the same verdict.
    """

    def __init__(self, guard: GuardConfig, evaluation: EvalConfig) -> None:
        self._max_bad_steps = guard.max_bad_steps
        self._spikes = SpikeDetector(guard.spike_sigma, guard.spike_window)
        self._patience = Patience(evaluation.patience, evaluation.better_by)
        self.rollbacks = 0
        self.loss, self.grad_norm = math.nan, math.nan
        """Loss (nats) and gradient norm (before clipping) of the last judged step."""
        self._bad_steps = 0  # consecutive skipped steps
        self._reason = ""  # why the last step was skipped
        self._goes_back_for = ""
        self._lost = False  # the held-out loss is not finite

    def see_step(self, loss: float, grad_norm: float) -> Spike | None:
        """Judge a step's loss and gradient norm; return a spike, or None."""
        self.loss, self.grad_norm = loss, grad_norm
        return self._spikes.see(loss, grad_norm)

    def see_applied(self) -> None:
        """Record a step that changed the weights."""
        self._bad_steps = 0

    def see_skipped(self, reason: str, is_bad: bool) -> None:
        """Record a skipped step; too many consecutive ones with `is_bad` are divergence."""
        self._bad_steps += is_bad
        self._reason = reason

    def see_evaluation(self, loss: float, step: int) -> None:
        """Record a held-out loss in nats."""
        self._patience.see(loss, step)
        self._lost = step > 0 and not math.isfinite(loss)

    def ask_to_go_back(self, reason: str) -> None:
        """Request a rollback instead of the current step, which has changed nothing."""
        self._goes_back_for = reason

    def verdict(self, step: int, is_last: bool, run_folder: object) -> Verdict:
        """Return the verdict on a run after step `step`."""
        if self._goes_back_for:
            return Verdict(Next.ROLL_BACK, self._goes_back_for)
        if self._lost:
            message = f"the held-out loss is not finite: {ADVICE}"
            return Verdict(Next.STOP, message, ExitCode.DIVERGED)
        if self._bad_steps >= self._max_bad_steps:
            return Verdict(Next.STOP, self._diagnosis(step, run_folder), ExitCode.DIVERGED)
        if self._patience.is_over and not is_last:
            best, best_step = self._patience.best, self._patience.best_step
            message = f"the held-out loss was best at step {best_step}, {best:.4f} (eval.patience)"
            return Verdict(Next.END_EARLY, message)
        return Verdict()

    @property
    def best(self) -> tuple[int, float]:
        """Step and value (nats) of the lowest held-out loss."""
        return self._patience.best_step, self._patience.best

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        return {
            "bad_steps": self._bad_steps,
            "rollbacks": self.rollbacks,
            "seen": self._spikes.state(),
            "patience": self._patience.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` from a checkpoint; missing parts are reset."""
        self._spikes.restore(state.get("seen", {}))
        self._patience.restore(state.get("patience", {}))
        self._bad_steps = state.get("bad_steps", 0)
        self.rollbacks = state.get("rollbacks", 0)
        self._goes_back_for, self._lost = "", False

    def _diagnosis(self, step: int, run_folder: object) -> str:
        count = self._bad_steps
        return (
            f"{count} steps in a row were skipped (guard.max_bad_steps), the last because "
            f"{self._reason}. The weights are those of step {step - count}. To see the last batch: "
            f"python {script('tools/show_batch.py')} {run_folder} --step {step}; {ADVICE}"
        )
