"""The end of a run: what it records, its exit code, and how its ranks leave.

All ranks leave together after the last step or a stop (`leaving`), which is mostly decided by
run/step.py. A rank that fails ends all at once (engine/processes.py), and the watchdog ends ranks
that hang (guard/watchdog.py); `fails` and `hangs` record these two.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.engine.processes import alarm, leave
from harness.errors import CannotSave, ExitCode, RunStopped
from harness.guard.failure_broadcast import Failure
from harness.run.live_memory import is_out_of_memory
from harness.run.reporting import explain_out_of_memory
from harness.run.run import Run
from harness.runfolder import Outcome

_OUTCOMES: dict[ExitCode, Outcome] = {
    ExitCode.DONE: "done",
    ExitCode.STOPPED: "stopped",
    ExitCode.OVER_BUDGET: "stopped",
    ExitCode.DIVERGED: "diverged",
    ExitCode.CANNOT_SAVE: "failed",
    ExitCode.NO_CHECKPOINT: "failed",
}
_PATIENCE_S = 10.0
"""Maximum seconds that a failing run waits for its last page, as other ranks must end, too."""


@dataclass
class Ending:
    """How a run ended."""

    code: ExitCode = ExitCode.DONE
    message: str | None = None

    @property
    def outcome(self) -> Outcome:
        """Its word in the run folder."""
        return _OUTCOMES[self.code]


@contextlib.contextmanager
def leaving(run: Run) -> Iterator[Ending]:
    """Return a context that records the run's end and leaves the process group. Collective.

    A RunStopped, which all ranks raise together, ends it. Any other exception may concern this rank
    only, and `ending_together` reports it to the others.
    """
    ending = Ending()
    try:
        yield ending
    except RunStopped as stop:
        ending.code, ending.message = stop.code, stop.message
        _announce(run, ending)
    except BaseException as error:
        if run.watchdog.hung:  # another rank ended first, which closed its connections
            run.watchdog.join()  # ends this process
        if is_out_of_memory(error):
            explain_out_of_memory(run)
        raise
    _record(run, ending)
    is_together = ending.outcome != "failed"
    if is_together:  # launchers end the other ranks soon after the first one has ended
        run.guard.meet()
        alarm().close()  # while rank 0, which holds the store that it polls, is there
        run.guard.meet()
    run.guard.close(wait=is_together)
    leave()
    run.watchdog.close()


def break_off(run: Run) -> None:
    """End a run that a tool has interrupted; the process group stays."""
    _record(run, Ending(ExitCode.STOPPED))
    run.guard.close(wait=False)
    run.watchdog.close()


def _announce(run: Run, ending: Ending) -> None:
    outcome, step = ending.outcome, run.state.step
    try:
        run.event(outcome, step=step, message=ending.message)
    except CannotSave as error:  # must not hide the stop, on any rank
        run.progress.say(str(error))
    again = ""
    if outcome == "stopped":
        again = f"; to resume, run the same command with run.dir={run.folder.path}"
    run.progress.say(f"{outcome} at step {step}: {ending.message}{again}")


def _record(run: Run, ending: Ending) -> None:
    """Record the end of the run on rank 0, and close its folder."""
    if run.is_writer:
        try:
            run.folder.write_status(ending.outcome, ending.code, run.state.step, ending.message)
            run.trackers.close(ending.outcome)
        except CannotSave as error:  # must not hide what ended the run
            run.progress.say(str(error))
        run.notifier.tell(ending.outcome, ending.code, ending.message)
        if (page := run.pages.finish()) is not None:
            run.progress.say(f"report {page}")
        run.notifier.close()
        run.folder.close()


def hangs(run: Run, report: dict[str, Any] | None) -> None:
    """Write the final report, on the watchdog's thread. This process ends next."""
    rank, step, message = run.plan.world.rank, run.state.step, "the ranks hang"
    if report is not None:
        message = report["message"]
        run.folder.append_failure(rank, "hang", step=step, message=message)
    if report is not None or run.is_writer:  # rank 0 itself may hang
        run.folder.write_failure(ExitCode.HANG, step, message)
    run.notifier.tell("hang", ExitCode.HANG, message)
    run.pages.finish(_PATIENCE_S)
    run.notifier.close()


def fails(run: Run, failure: Failure) -> None:
    """Record the failure that ends all ranks, on the rank that failed or noticed it, and on rank 0,
    which sees the folder even if the failed rank does not. This process ends next.
    """
    step, message = run.state.step, failure.message
    if failure.noticed_by is not None:
        message = str(failure)
    reports = run.plan.world.rank in (failure.rank, failure.noticed_by)
    if reports:
        run.folder.append_failure(failure.rank, step=step, message=message)
    if reports or run.is_writer:
        run.folder.write_failure(failure.code, step, message)
    run.notifier.tell("failed", failure.code, message)
    run.pages.finish(_PATIENCE_S)
    run.notifier.close()
    run.folder.close()
