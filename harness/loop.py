"""The training loop. Every tool runs this loop rather than a copy of it."""

from contextlib import closing

from harness.errors import ExitCode, RunStopped
from harness.guard.stability import Next, Verdict
from harness.run.build import build
from harness.run.ending import leaving
from harness.run.evaluation import evaluate
from harness.run.finish import finish
from harness.run.reporting import evaluate_at_start, evaluate_weights, log_or_evaluate
from harness.run.run import Run
from harness.run.saving import finish_save, save_if_due
from harness.run.step import apply_verdict, decide, end_early_at_start, next_step, take_step

__all__ = ["Run", "build", "evaluate", "train"]


def train(run: Run) -> ExitCode:
    """Train until the last step or a stop. All ranks return together, after leaving the process
    group and recording the outcome in the run folder. Collective.
    """
    run.progress.say(f"run folder {run.folder.path}")
    with leaving(run) as ending:
        if not run.steps.are_left and run.guard.told_by_rank_0(run.folder.export_dir.exists()):
            run.progress.say("nothing is left to do: the run is complete")
        else:
            run.notifier.open(run)
            verdict = _train(run)
            finish(run)
            if verdict.code is not ExitCode.DONE:
                raise RunStopped(verdict.code, verdict.message)
    return ending.code


def _train(run: Run) -> Verdict:
    """Take all steps; return the last verdict. On a stop, finish the pending save first: it is the
    newest checkpoint.
    """
    run.guard.stop_if_asked()
    run.guard.request.trains()
    try:
        with closing(run.steps), run.observed():
            return _loop(run)
    except RunStopped:
        try:
            finish_save(run)
        except RunStopped as unsaved:  # must not hide the reason for the stop
            run.event("failed", step=run.state.step, message=unsaved.message)
        raise


def _loop(run: Run) -> Verdict:
    """Take one optimizer step after another. The host waits for the device only when logging, and
    in steps checked by guard.spikes or by fp32 at ZeRO stage 0.
    """
    evaluate_at_start(run)
    verdict = end_early_at_start(run)
    for instrument in run.instruments:
        instrument.begin(run)
    run.meter.restart()
    while run.steps.are_left:
        step = next_step(run)
        result = take_step(run, step)
        log_or_evaluate(run, step, result)
        verdict = decide(run)
        if verdict.next is Next.END_EARLY:
            evaluate_weights(run)
        save_if_due(run, verdict)
        apply_verdict(run, verdict)
    return verdict
