"""Takes optimizer steps: batches, the engine's step, and the decisions after it."""

from dataclasses import asdict, replace

import torch

from harness.checkpoint.store import newest_usable
from harness.config.batch import Slice
from harness.engine.api import StepResult
from harness.errors import ExitCode, RunStopped
from harness.guard.skip import Cause, why_skipped
from harness.guard.stability import ADVICE, Next, Spike, Verdict
from harness.run.run import Run
from harness.run.saving import finish_save, load_into
from harness.steps import Step


def next_step(run: Run) -> Step:
    """Return the next optimizer step; waiting for its data is a separate phase of the pulse."""
    number = run.state.step + 1
    run.pulse("data", number)
    step = run.steps.take()
    run.pulse("step", number)
    return step


def take_step(run: Run, step: Step) -> StepResult | None:
    """Take an optimizer step; skip it if it is a spike and guard.spikes says so. Collective.

    Returns None if the run must roll back instead; nothing has changed then. Raises RunStopped
    (diverged) if fp16's loss scale is already at its minimum.
    """
    policy, spikes = run.plan.config.guard.spikes, list[Spike]()

    def is_spike(loss_share: torch.Tensor, norm: torch.Tensor) -> bool:
        """Check the gradients, and return True for a spike of loss or norm. Collective.

        Both are summed over all ranks: if each tensor-parallel rank looked at its own loss, a rank
        that differs would skip a step that the others take.
        """
        for instrument in run.instruments:
            instrument.gradients()
        if policy == "log":
            return False
        grid = run.plan.grid
        shares = torch.stack([loss_share.double() / grid.tensor, norm.double() / grid.world_size])
        spike = look_for_spike(run, step.number, step.reads, *run.sum(shares, over="norm"))
        spikes.extend([spike] if spike else [])
        return spike is not None

    for instrument in run.instruments:
        instrument.before(step)
    torch.manual_seed(step.dropout_seed)
    judges = policy != "log" or any(each.sees_gradients for each in run.instruments)
    try:
        result: StepResult = run.engine.train_batch(
            step.batches, step.targets, step.lr, is_spike if judges else None
        )
    except RunStopped as stop:  # fp16's loss scale is at its minimum
        if policy != "rollback":
            raise
        run.stability.ask_to_go_back(stop.message)
        return None
    spike = spikes[0] if spikes else None
    if spike and policy == "rollback":
        run.stability.ask_to_go_back(f"a spike of {spike.quantity}")
        return None
    run.steps.done(step)
    run.held_out_nats = None  # it was that of other weights
    run.meter.step_done(step)
    _record_skipped(run, step, result, spike)
    for instrument in run.instruments:
        instrument.step(step, result)
    return result


def look_for_spike(
    run: Run, number: int, reads: Slice, loss: float, grad_norm: float
) -> Spike | None:
    """Look for a spike in a step's loss and gradient norm; record and return it, if any."""
    spike = run.stability.see_step(loss, grad_norm)
    if spike is not None:
        values = {"loss": loss, "grad_norm": grad_norm, "samples": reads.samples, **asdict(spike)}
        run.event("spike", step=number, policy=run.plan.config.guard.spikes, **values)
    return spike


def _record_skipped(run: Run, step: Step, result: StepResult, spike: Spike | None) -> None:
    """Record a step that was not applied. The host waits only for such a step. A step without
    targets says nothing about the weights and is not counted.
    """
    if not step.targets:
        reason, samples = Cause.NO_TARGETS.value, step.reads.samples
        run.event("skipped_step", step=step.number, reason=reason, samples=samples, loss=None)
        return
    if run.engine.step_applied:
        run.stability.see_applied()
        return
    (loss,) = run.sum(result.loss_share.detach().clone().view(1))
    norm, scale = float(result.grad_norm), run.engine.loss_scale
    is_scaled = run.plan.precision == "fp16" and not run.plan.deepspeed["fp16"].get("loss_scale")
    cause, reason = why_skipped(spike, loss, is_scaled)
    run.event(
        "skipped_step", step=step.number, reason=reason, loss=loss, grad_norm=norm, loss_scale=scale
    )
    run.stability.see_skipped(f"{reason} (loss {loss:.4g}, norm {norm:.4g})", cause.is_bad)


def decide(run: Run) -> Verdict:
    """Return a verdict on the run, the same on all ranks. Collective."""
    is_last = not run.steps.are_left
    verdict = run.stability.verdict(run.state.step, is_last, run.folder.path)
    if verdict.next not in (Next.GO_ON, Next.END_EARLY):
        return verdict
    stop, is_written, is_over = run.stop_asked()
    if not is_last and verdict.next is Next.GO_ON:
        if stop:
            message = f"asked to stop by {run.guard.request.received or 'a rank'}"
            verdict = Verdict(Next.STOP, message, ExitCode.STOPPED)
        elif is_over:
            verdict = _over_budget(run)
    return replace(verdict, is_written=is_written)


def _over_budget(run: Run) -> Verdict:
    used, budget = run.folder.gpu_hours, run.plan.config.guard.budget_gpu_hours
    message = f"{used:.3g} GPU hours are used, of guard.budget_gpu_hours={budget:g}; raise it first"
    return Verdict(Next.END_EARLY, message, ExitCode.OVER_BUDGET)


def end_early_at_start(run: Run) -> Verdict:
    """End a resumed run that had already ended early, unless eval.patience or the budget was
    raised. Collective.
    """
    is_last = not run.steps.are_left
    verdict = run.stability.verdict(run.state.step, is_last, run.folder.path)
    if not is_last and run.guard.told_by_rank_0(run.is_over_budget):
        verdict = _over_budget(run)
    if verdict.next is not Next.END_EARLY:
        return Verdict()
    end_early(run, verdict)
    return verdict


def apply_verdict(run: Run, verdict: Verdict) -> None:
    """End the run early, roll it back, raise RunStopped, or continue. Collective."""
    if verdict.next is Next.END_EARLY:
        end_early(run, verdict)
    elif verdict.next is Next.ROLL_BACK:
        roll_back(run, verdict.message)
    elif verdict.next is Next.STOP:
        raise RunStopped(verdict.code, verdict.message)


def end_early(run: Run, verdict: Verdict) -> None:
    """Make the current step the last one."""
    (best_step, best), message = run.stability.best, verdict.message
    run.event("ended_early", step=run.state.step, best_step=best_step, best=best, message=message)
    run.progress.say(f"ended early at step {run.state.step}: {message}")
    run.steps.total = run.state.step


def roll_back(run: Run, reason: str) -> None:
    """Load the newest checkpoint, and continue with the samples after the failed step. Collective.

    Raises RunStopped (diverged) if there is no checkpoint, or after guard.max_rollbacks.
    """
    stability, number, samples = run.stability, run.state.step + 1, run.steps.next_slice.samples
    rollbacks = stability.rollbacks
    loss, norm = stability.loss, stability.grad_norm
    failure = f"step {number}: {reason} (loss {loss:.4g}, norm {norm:.4g})"
    if rollbacks >= run.plan.config.guard.max_rollbacks:
        problem = f"{rollbacks} rollbacks did not help (guard.max_rollbacks)"
        raise RunStopped(ExitCode.DIVERGED, f"{failure}, and {problem}; {ADVICE}")
    finish_save(run)
    run.pulse("load", run.state.step)
    checkpoint, _ = newest_usable(run.saver.store.folder)
    if checkpoint is None:
        problem = "there is no checkpoint to roll back to: set save.every"
        raise RunStopped(ExitCode.DIVERGED, f"{failure}, and {problem}; {ADVICE}")
    load_into(run.engine, checkpoint)
    state, end = checkpoint.state, samples[1]
    tokens = state.tokens + run.data.train.tokens_in(state.samples, end - state.samples)
    run.steps.move(replace(state, samples=end, tokens=tokens))
    end_with_the_data(run)
    run.held_out_nats = checkpoint.manifest.held_out_loss
    stability.restore(checkpoint.manifest.watch)
    stability.rollbacks = rollbacks + 1
    for instrument in run.instruments:
        instrument.rolled_back()
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
    run.progress.say(f"{failure}: rolled back to step {state.step}, skipping samples {skipped}")


def end_with_the_data(run: Run) -> None:
    """End the run at the last step for which there is data: samples that a rollback has skipped are
    missing at the end of a mixture whose sources have limited epochs.
    """
    state, steps, after = run.state, run.steps, run.plan.curriculum.samples_after
    most, left = run.data.train.length, steps.total - state.step
    while left and most is not None and after(left, state.samples) > most:
        left -= 1
    if state.step + left < steps.total:
        message = f"the run ends at step {state.step + left}, where data.mix runs out"
        run.event("ends_with_its_data", step=state.step, message=message)
        run.progress.say(message)
        steps.total = state.step + left
