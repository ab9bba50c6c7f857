"""The verdict on a run after each step: reached by all ranks together, and carried out."""

from __future__ import annotations

from dataclasses import replace

from harness.checkpoint.find import newest_usable
from harness.errors import ExitCode, RunStopped
from harness.guard.judge import ADVICE, Verdict
from harness.run.resumption import load_into
from harness.run.run import Run
from harness.run.saving import finish_save


def ask(run: Run) -> Verdict:
    """Return one verdict on the run, the same on all ranks. Collective."""
    is_last = not run.steps.are_left
    verdict = run.judge.verdict(run.state.step, is_last, run.folder.path)
    if verdict.kind not in ("go on", "end early"):
        return verdict
    stop, is_written = run.stop_asked()
    if stop and not is_last and verdict.kind == "go on":
        message = f"asked to stop by {run.guard.received or 'a rank'}"
        verdict = Verdict("stop", message, ExitCode.STOPPED)
    return replace(verdict, is_written=is_written)


def end_early_at_start(run: Run) -> None:
    """End a resumed run that had already ended early, unless its patience was raised."""
    verdict = run.judge.verdict(run.state.step, not run.steps.are_left, run.folder.path)
    if verdict.kind == "end early":
        end_early(run, verdict)


def carry_out(run: Run, verdict: Verdict) -> None:
    """End the run early, roll it back, raise RunStopped, or do nothing. Collective."""
    if verdict.kind == "end early":
        end_early(run, verdict)
    elif verdict.kind == "roll back":
        roll_back(run, verdict.message)
    elif verdict.kind == "stop":
        raise RunStopped(verdict.code, verdict.message)


def end_early(run: Run, verdict: Verdict) -> None:
    """Make the current step the last one (eval.patience)."""
    best_step, best = run.judge.best
    run.event("ended_early", step=run.state.step, best_step=best_step, best=best)
    message = f"ends at step {run.state.step}, early (eval.patience): {verdict.message}"
    run.progress.say(message)
    run.steps.total = run.state.step


def roll_back(run: Run, reason: str) -> None:
    """Load the newest checkpoint, and continue with the samples after the failed step.

    Raises RunStopped (diverged) if there is none, or after guard.max_rollbacks. Collective.
    """
    judge, number, samples = run.judge, run.state.step + 1, run.steps.next_slice.samples
    rollbacks = judge.rollbacks
    loss, norm = judge.loss, judge.grad_norm
    failure = f"step {number}: {reason} (loss {loss:.4g}, norm {norm:.4g})"
    if rollbacks >= run.plan.config.guard.max_rollbacks:
        problem = f"{rollbacks} rollbacks did not help (guard.max_rollbacks)"
        raise RunStopped(ExitCode.DIVERGED, f"{failure}, and {problem}; {ADVICE}")
    finish_save(run)
    run.pulse("load", run.state.step)
    checkpoint, _ = newest_usable(run.saver.store.folder)
    if checkpoint is None:
        problem = "there is no checkpoint to go back to: set save.every"
        raise RunStopped(ExitCode.DIVERGED, f"{failure}, and {problem}; {ADVICE}")
    load_into(run.engine, checkpoint)
    state, end = checkpoint.state, samples[1]
    tokens = state.tokens + run.data.train.tokens_in(state.samples, end - state.samples)
    run.steps.move(replace(state, samples=end, tokens=tokens))
    run.held_out_nats = checkpoint.manifest.held_out_loss
    judge.restore(checkpoint.manifest.watch)
    judge.rollbacks = rollbacks + 1
    if run.profiler:
        run.profiler.drop()
    run.meter.restart()
    skipped = [state.samples, end]
    run.event(
        "rollback",
        from_step=number,
        to_step=state.step,
        samples_skipped=skipped,
        why=reason,
        loss=loss,
        grad_norm=norm,
    )
    run.progress.say(f"{failure}: back to step {state.step}, past samples {skipped}")
