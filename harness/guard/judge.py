"""Judges every step of a run: go on, end early, roll back, or stop as diverged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.config.conduct_sections import EvalConfig, GuardConfig
from harness.errors import ExitCode
from harness.guard.patience import Patience
from harness.guard.spikes import Spike, SpikeDetector

ADVICE = "resume from a checkpoint before it, in a new run.dir, with a lower optim.lr"


@dataclass(frozen=True)
class Verdict:
    """The decision on a run after a step."""

    kind: Literal["go on", "end early", "roll back", "stop"] = "go on"
    message: str = ""
    code: ExitCode = ExitCode.DONE
    """Exit code of a run that stops."""
    is_written: bool = False
    """True once all ranks have written the checkpoint that was under way."""


class Judge:
    """Reads the losses, norms and evaluations of a run, and does not change it.

    Its `state` is in every checkpoint: a resumed run is judged like the run that saved it. Ranks
    that see the same numbers reach the same verdict.
    """

    def __init__(self, guard: GuardConfig, evaluation: EvalConfig) -> None:
        self._max_bad_steps = guard.max_bad_steps
        self._spikes = SpikeDetector(guard.spike_sigma, guard.spike_window)
        self._patience = Patience(evaluation.patience, evaluation.better_by)
        self.rollbacks = 0
        self.loss, self.grad_norm = math.nan, math.nan
        """Loss (nats) and norm (before clipping) of the last step that was read."""
        self._bad_steps = 0  # skipped ones, in a row
        self._reason = ""  # of the last skipped step
        self._goes_back_for = ""
        self._lost = False  # the held-out loss is not finite

    def see_step(self, loss: float, grad_norm: float) -> Spike | None:
        """Judge a step's loss and gradient norm; return a spike."""
        self.loss, self.grad_norm = loss, grad_norm
        return self._spikes.see(loss, grad_norm)

    def see_applied(self) -> None:
        """Note a step that changed the weights."""
        self._bad_steps = 0

    def see_skipped(self, reason: str, is_bad: bool) -> None:
        """Note a skipped step; `is_bad`: too many of these in a row are divergence."""
        self._bad_steps += is_bad
        self._reason = reason

    def see_evaluation(self, loss: float, step: int) -> None:
        """Note a held-out loss in nats."""
        self._patience.see(loss, step)
        self._lost = step > 0 and not math.isfinite(loss)

    def ask_to_go_back(self, reason: str) -> None:
        """Ask for a rollback in place of the current step, which has changed nothing."""
        self._goes_back_for = reason

    def verdict(self, step: int, is_last: bool, run_folder: object) -> Verdict:
        """Return the verdict on a run that is at `step`."""
        if self._goes_back_for:
            return Verdict("roll back", self._goes_back_for)
        if self._lost:
            message = f"the held-out loss is not finite: {ADVICE}"
            return Verdict("stop", message, ExitCode.DIVERGED)
        if self._bad_steps >= self._max_bad_steps:
            return Verdict("stop", self._diagnosis(step, run_folder), ExitCode.DIVERGED)
        if self._patience.is_over and not is_last:
            best, best_step = self._patience.best, self._patience.best_step
            return Verdict(
                "end early", f"the held-out loss was best at step {best_step}, {best:.4f}"
            )
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
        """Set a `state` from a checkpoint; missing parts are reset."""
        self._spikes.restore(state.get("seen", {}))
        self._patience.restore(state.get("patience", {}))
        self._bad_steps = state.get("bad_steps", 0)
        self.rollbacks = state.get("rollbacks", 0)
        self._goes_back_for, self._lost = "", False

    def _diagnosis(self, step: int, run_folder: object) -> str:
        count = self._bad_steps
        return (
            f"{count} steps in a row were skipped (guard.max_bad_steps), the last because "
            f"{self._reason}. Weights are those of step {step - count}. What it read: "
            f"tools/show_batch.py {run_folder} --step {step}; {ADVICE}"
        )
