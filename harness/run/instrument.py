"""Instruments: each measures one thing of a run and logs it. `build.py` lists them.

A new metric is a new instrument.
"""

from collections.abc import Mapping
from typing import Any

import torch

from harness.engine.api import StepResult
from harness.steps import Step


class Instrument:
    """Observes the steps of a run.

    Every rank calls the hooks of `Run.instruments` in their order, so all but `end` may be
    collective. They must not wait for the device, except in a step with a metrics line or in a few
    first steps. What takes time calls `run.meter.restart()`: it is not part of a step.
    """

    sees_gradients = False
    """True while `gradients` has to be called, for which the step waits."""

    def begin(self, run: Any) -> None:
        """Called before the first step of this process."""
        self._run = run

    def before(self, step: Step) -> None:
        """Called before each optimizer step, also one that the run then rolls back."""

    def gradients(self) -> None:
        """Called between backward pass and step, where `guard.spikes` or an instrument asks."""

    def step(self, step: Step, result: StepResult) -> None:
        """Called after each step, applied or skipped, unless the run rolls it back."""

    def values(self, step: Step) -> Mapping[str, torch.Tensor]:
        """Return scalars for the step's metrics line, on the device: one wait reads all of them."""
        return {}

    def line(self, step: Step) -> Mapping[str, Any]:
        """Return further fields of the line."""
        return {}

    def after(self, step: Step, line: Mapping[str, Any] | None) -> None:
        """Called at the end of a step, with its metrics line, if any."""

    def rolled_back(self) -> None:
        """Called when the run has loaded an earlier checkpoint."""

    def end(self, error: BaseException | None) -> None:
        """Called last, also without `begin`: after the last step, a stop (`error` is RunStopped) or
        a failure of this rank.
        """
