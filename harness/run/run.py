"""A run: all its components on this rank."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.checkpoint.manifest import TrainState
from harness.checkpoint.save import Saver
from harness.data.data import Data
from harness.engine.api import Engine
from harness.guard.signals import StopGuard
from harness.guard.stability import StabilityMonitor
from harness.guard.time_left import TimeLeft
from harness.guard.watchdog import Pulse, Watchdog
from harness.layout.grid import Purpose
from harness.plan.plan import Plan
from harness.run.instrument import Instrument
from harness.run.meter import Meter
from harness.run.notify import Notifier
from harness.run.pages import Pages
from harness.run.progress import Progress
from harness.run.trackers import Trackers
from harness.runfolder import RunFolder
from harness.steps import Steps


def is_due(step: int, every: int) -> bool:
    """Return True at every multiple of `every` steps; never if that is 0."""
    return every > 0 and step % every == 0


@dataclass
class Run:
    """All components of a run on this rank. Only rank 0's folder is open for writing."""

    plan: Plan
    data: Data
    engine: Engine
    folder: RunFolder
    saver: Saver
    steps: Steps
    stability: StabilityMonitor
    guard: StopGuard
    pulse: Pulse
    watchdog: Watchdog
    time_left: TimeLeft
    meter: Meter
    progress: Progress
    pages: Pages
    trackers: Trackers
    notifier: Notifier
    instruments: tuple[Instrument, ...]
    held_out_nats: float | None = None
    """Held-out loss of the current weights, in nats; None if they have not been evaluated."""

    @property
    def state(self) -> TrainState:
        """The progress of the run."""
        return self.steps.state

    @property
    def is_writer(self) -> bool:
        """True on the rank that writes the run folder."""
        return self.plan.world.rank == 0

    def sum(self, values: torch.Tensor, over: Purpose = "loss") -> list[float]:
        """Return the values summed over the ranks of a group; waits for the device. Collective."""
        dist.all_reduce(values, group=self.engine.group_of(over))
        sums: list[float] = values.tolist()
        return sums

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Return a context that ends all instruments when it is left."""
        with contextlib.ExitStack() as stack:
            for instrument in reversed(self.instruments):
                stack.push(lambda _, error, __, each=instrument: each.end(error))
            yield

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event, on rank 0."""
        if self.is_writer:
            self.folder.append_event(kind, **fields)

    @property
    def is_over_budget(self) -> bool:
        """True once the run has used guard.budget_gpu_hours, by this rank's clock."""
        budget = self.plan.config.guard.budget_gpu_hours
        return budget is not None and self.folder.gpu_hours >= budget

    def stop_asked(self) -> tuple[bool, bool, bool]:
        """Return the result of `guard.agree`; rank 0 first checks the time limit. Collective."""
        if self.is_writer and self.time_left.is_short_of(self._most_before_the_end_s()):
            self.guard.request.ask("the time limit")
        return self.guard.agree(self.saver.written, self.is_over_budget)

    def _most_before_the_end_s(self) -> float:
        """Return the seconds that another step may take, the steps in which all ranks learn of the
        stop, the saves that are in progress or due until then, and the last save.
        """
        step_s, stall_s = (self.pulse.longest_s(phase) or 0.0 for phase in ("step", "save"))
        save_s = max(stall_s, self.saver.longest_s or self.time_left.first_save_s)
        delay, every = self.guard.delay, self.plan.config.save.every
        due = sum(is_due(self.state.step + n, every) for n in range(1 + delay))
        saves = self.saver.is_busy + due + 1.5  # the last one may be slower than those before
        return (1 + delay) * step_s + saves * save_s
