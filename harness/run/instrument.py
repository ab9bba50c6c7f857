"""Instruments: each measures one thing of a run and logs it. `build.py` lists them.

A new metric is a new instrument.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from harness.config.own import METRICS, ROWS, Row
from harness.engine.api import StepResult
from harness.errors import ConfigError
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


class OwnMetric(Instrument):
    """A metric of run.code that is a function: own/NAME in every metrics line."""

    def __init__(self, row: Row, values: Mapping[str, Any]) -> None:
        self._row, self._function = row, row.bound(values)

    def values(self, step: Step) -> dict[str, torch.Tensor]:
        """Return the number that the function returns. Raises ConfigError for anything else."""
        value = self._function(self._run, step)
        if not isinstance(value, int | float | torch.Tensor) or torch.as_tensor(value).numel() != 1:
            raise ConfigError(f"{self._row} returns {value!r}, not a number or a scalar tensor")
        return {f"own/{self._row.name}": torch.as_tensor(value).reshape(())}


def own_metrics(values: Mapping[str, Any]) -> Iterator[Instrument]:
    """Yield the metrics of run.code, made with values of own.*. Raises ConfigError."""
    for row in (ROWS["metric", name] for name in METRICS):
        if not isinstance(row.function, type):
            yield OwnMetric(row, values)
        elif issubclass(row.function, Instrument):
            yield row.bound(values)()
        else:
            raise ConfigError(f"{row} is a class, but not of harness.run.instrument.Instrument")
