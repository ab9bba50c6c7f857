"""A run: all its components on this rank."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from harness.checkpoint.manifest import TrainState
from harness.checkpoint.save import Saver
from harness.data.data import Data
from harness.engine.api import Engine
from harness.errors import CannotSave, ExitCode
from harness.guard.failure_broadcast import Failure
from harness.guard.signals import StopGuard, TimeLeft
from harness.guard.stability import StabilityMonitor
from harness.guard.watchdog import Pulse, Watchdog
from harness.layout.grid import Purpose
from harness.plan.plan import Plan
from harness.run.live_memory import MemoryCheck
from harness.run.meter import Meter, SourceLosses, StepClock, WeightChange
from harness.run.pages import Pages
from harness.run.profiling import Profiler
from harness.run.progress import Progress
from harness.run.trackers import Trackers
from harness.runfolder import Outcome, RunFolder
from harness.steps import Steps

FAILURE_PATIENCE_S = 10.0
"""Maximum seconds that a failing run waits for its last page, as other ranks must end, too."""


def is_due(step: int, every: int) -> bool:
    """Return True at every multiple of `every` steps; never if that is 0."""
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class Undivided:
    """Loss and gradient norm of the first global batch by the undivided model on one rank."""

    loss: float
    grad_norm: float | None
    """None if training steps are random."""


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
    memory: MemoryCheck
    clock: StepClock
    progress: Progress
    source_losses: SourceLosses
    pages: Pages
    weights: WeightChange
    trackers: Trackers
    profiler: Profiler | None = None
    """None if this process takes none of profile.steps."""
    held_out_nats: float | None = None
    """Held-out loss of the current weights, in nats; None if they have not been evaluated."""
    longest_save_s: float = 0.0
    """Longest time in seconds from the start of a save, background or not, to its checkpoint."""
    first_step: int = field(init=False)
    """Number of the first step of this process."""
    undivided: Undivided | None = field(init=False)
    """None if the first step is not compared with the undivided model."""
    attention_is_seen: bool = True
    """False once the model's attention could not be inspected."""
    gradients_agree: bool = False
    """True once tensor-parallel ranks have agreed on the gradients of weights that all of them
    hold.
    """

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

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event, on rank 0."""
        if self.is_writer:
            self.folder.append_event(kind, **fields)

    def stop_asked(self) -> tuple[bool, bool]:
        """Return the result of `guard.agree`; rank 0 first checks the time limit. Collective."""
        if self.is_writer and self.time_left.is_short_of(self._most_before_the_end_s()):
            self.guard.request.ask("the time limit")
        return self.guard.agree(self.saver.written)

    def _most_before_the_end_s(self) -> float:
        """Return the seconds that another step may take, the steps in which all ranks learn of the
        stop, the saves that are in progress or due until then, and the last save.
        """
        step_s, stall_s = (self.pulse.longest_s(phase) or 0.0 for phase in ("step", "save"))
        save_s = max(stall_s, self.longest_save_s or self.time_left.first_save_s)
        delay, every = self.guard.delay, self.plan.config.save.every
        due = sum(is_due(self.state.step + n, every) for n in range(1 + delay))
        saves = self.saver.is_busy + due + 1.5  # the last one may be slower than those before
        return (1 + delay) * step_s + saves * save_s

    def hangs(self, report: dict[str, Any] | None) -> None:
        """Write the final report, on the watchdog's thread. This process ends next."""
        rank, step, message = self.plan.world.rank, self.state.step, "the ranks hang"
        if report is not None:
            message = report["message"]
            self.folder.append_failure(rank, "hang", step=step, message=message)
        if report is not None or self.is_writer:  # rank 0 itself may hang
            self.folder.write_failure(ExitCode.HANG, step, message)
        self.pages.finish(FAILURE_PATIENCE_S)

    def fails(self, failure: Failure) -> None:
        """Record the failure that ends all ranks, on the rank that failed or noticed it, and on
        rank 0, which sees the folder even if the failed rank does not. This process ends next.
        """
        step, message = self.state.step, failure.message
        if failure.noticed_by is not None:
            message = str(failure)
        reports = self.plan.world.rank in (failure.rank, failure.noticed_by)
        if reports:
            self.folder.append_failure(failure.rank, step=step, message=message)
        if reports or self.is_writer:
            self.folder.write_failure(failure.code, step, message)
        self.pages.finish(FAILURE_PATIENCE_S)
        self.folder.close()

    def ended(self, outcome: Outcome, code: int, message: str | None = None) -> None:
        """Record the end of the run on rank 0, and close its folder."""
        if self.is_writer:
            try:
                self.folder.write_status(outcome, code, self.state.step, message)
                self.trackers.close(outcome)
            except CannotSave as error:  # must not hide what ended the run
                self.progress.say(str(error))
            if (page := self.pages.finish()) is not None:
                self.progress.say(f"report {page}")
            self.folder.close()
