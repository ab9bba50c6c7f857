"""The training loop. Every tool runs this loop rather than a copy of it."""

from contextlib import closing, nullcontext

from harness.engine.processes import alarm, leave
from harness.errors import CannotSave, ExitCode, RunStopped
from harness.run.build import build
from harness.run.evaluation import evaluate
from harness.run.finish import finish
from harness.run.live_memory import is_out_of_memory
from harness.run.reporting import evaluate_at_start, explain_out_of_memory, log_or_evaluate
from harness.run.run import Run
from harness.run.saving import finish_save, save_if_due
from harness.run.step import (
    apply_verdict,
    before_first_step,
    decide,
    end_early_at_start,
    next_step,
    take_step,
)
from harness.runfolder import Outcome

__all__ = ["Run", "build", "evaluate", "train"]

_OUTCOMES: dict[ExitCode, Outcome] = {
    ExitCode.STOPPED: "stopped",
    ExitCode.DIVERGED: "diverged",
    ExitCode.CANNOT_SAVE: "failed",
    ExitCode.NO_CHECKPOINT: "failed",
}


def train(run: Run) -> ExitCode:
    """Train until the last step or a stop. All ranks return together, after leaving the process
    group and recording the outcome in the run folder. Collective.

    An exception may occur on this rank only; `ending_together` reports it to the other ranks.
    """
    outcome: Outcome = "done"
    code, message = ExitCode.DONE, None
    run.progress.say(f"run folder {run.folder.path}")
    try:
        if not run.steps.are_left and run.guard.told_by_rank_0(run.folder.export_dir.exists()):
            run.progress.say("nothing is left to do: the run is complete")
        else:
            _train(run)
            finish(run)
    except RunStopped as stop:
        outcome, code, message = _OUTCOMES[stop.code], stop.code, stop.message
        try:
            run.event(outcome, step=run.state.step, message=message)
        except CannotSave as error:  # must not hide the stop, on any rank
            run.progress.say(str(error))
        again = ""
        if outcome == "stopped":
            again = f"; to resume, run the same command with run.dir={run.folder.path}"
        run.progress.say(f"{outcome} at step {run.state.step}: {message}{again}")
    except BaseException as error:
        if run.watchdog.hung:  # another rank ended first, which closed its connections
            run.watchdog.join()  # ends this process
        if is_out_of_memory(error):
            explain_out_of_memory(run)
        raise
    run.ended(outcome, code, message)
    if outcome != "failed":  # launchers end the other ranks soon after the first one has ended
        run.guard.meet()
        alarm().close()  # while rank 0, which holds the store that it polls, is there
        run.guard.meet()
    run.guard.close(wait=outcome != "failed")
    leave()
    run.watchdog.close()
    return code


def _train(run: Run) -> None:
    """Take all steps. On a stop, finish the pending save first: it is the newest checkpoint."""
    run.guard.stop_if_asked()
    run.guard.request.trains()
    try:
        _loop(run)
    except RunStopped:
        try:
            finish_save(run)
        except RunStopped as unsaved:  # must not hide the reason for the stop
            run.event("failed", step=run.state.step, message=unsaved.message)
        raise


def _loop(run: Run) -> None:
    """Take one optimizer step after another. The host waits for the device only when logging, and
    in steps checked by guard.spikes or by fp32 at ZeRO stage 0.
    """
    with closing(run.steps), run.profiler or nullcontext():
        evaluate_at_start(run)
        end_early_at_start(run)
        before_first_step(run)
        run.meter.restart()
        while run.steps.are_left:
            step = next_step(run)
            result = take_step(run, step)
            log_or_evaluate(run, step, result)
            verdict = decide(run)
            save_if_due(run, verdict)
            apply_verdict(run, verdict)
