"""Takes a run's optimizer steps, and records skipped ones."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict

import torch

from harness.config.curriculum import Slice
from harness.engine.api import StepResult
from harness.errors import RunStopped
from harness.guard.spikes import Spike
from harness.run.first_step import after_first_step
from harness.run.run import Run
from harness.run.verify import check_gradients, gradients_unchecked
from harness.steps import Step


def next_step(run: Run) -> Step:
    """Return the next optimizer step; the pulse times its data."""
    number = run.state.step + 1
    run.pulse("data", number)
    step = run.steps.take()
    run.pulse("step", number)
    return step


def take_step(run: Run, step: Step) -> StepResult | None:
    """Take an optimizer step; skip it if it is a spike and guard.spikes says so. Collective.

    Return None if nothing was changed because the run is to roll back instead. Raises RunStopped
    (diverged) if fp16's loss scale cannot fall any further.
    """
    policy, spikes = run.plan.config.guard.spikes, list[Spike]()

    def is_spike(loss_share: torch.Tensor, norm: torch.Tensor) -> bool:
        """Judge loss and norm, equal on all ranks. Collective.

        Over all ranks: were tensor-parallel ranks to judge each its own loss, one that differs
        would skip a step that the others take.
        """
        grid = run.plan.grid
        shares = torch.stack([loss_share.double() / grid.tensor, norm.double() / grid.world_size])
        spike = look_for_spike(run, step.number, step.reads, *run.sum(shares, over="norm"))
        spikes.extend([spike] if spike else [])
        return spike is not None

    def judge(loss_share: torch.Tensor, norm: torch.Tensor) -> bool:
        check_gradients(run)
        return policy != "log" and is_spike(loss_share, norm)

    if run.source_losses.names:
        run.source_losses.step_taken(step.targets_by_source)
    log = run.plan.config.log
    if log.is_due(step.number, log.weights_every):
        run.weights.step_begins(step.number)
    torch.manual_seed(step.dropout_seed)
    try:
        with run.profiler.step(step.number) if run.profiler else nullcontext():
            result: StepResult = run.engine.train_batch(
                step.batches,
                step.targets,
                step.lr,
                judge if policy != "log" or gradients_unchecked(run) else None,
            )
    except RunStopped as stop:  # fp16's loss scale is at its minimum
        if policy != "rollback":
            raise
        run.judge.ask_to_go_back(stop.message)
        return None
    spike = spikes[0] if spikes else None
    if spike and policy == "rollback":
        run.judge.ask_to_go_back(f"a spike of {spike.of}")
        return None
    run.steps.done(step)
    run.meter.step_done(step)
    _record_skipped(run, step, result, spike)
    after_first_step(run, step, result)
    run.memory.step_done()
    return result


def look_for_spike(
    run: Run, number: int, reads: Slice, loss: float, grad_norm: float
) -> Spike | None:
    """Judge a step's loss and gradient norm; record and return a spike."""
    spike = run.judge.see_step(loss, grad_norm)
    if spike is not None:
        values = {"loss": loss, "grad_norm": grad_norm, "samples": reads.samples, **asdict(spike)}
        run.event("spike", step=number, policy=run.plan.config.guard.spikes, **values)
    return spike


def _record_skipped(run: Run, step: Step, result: StepResult, spike: Spike | None) -> None:
    """Record a step that was not applied.

    The host waits for the device only after such a step. A step without a target says nothing about
    the weights: it is not counted.
    """
    if not step.targets:
        reason = "none of its samples has a target token"
        samples = step.reads.samples
        run.event("skipped_step", step=step.number, reason=reason, samples=samples, loss=None)
        return
    if run.engine.step_applied:
        run.judge.see_applied()
        return
    (loss,) = run.sum(result.loss_share.detach().clone().view(1))
    norm = float(result.grad_norm)
    reason = "the gradients are not finite"
    is_scaled = run.plan.precision == "fp16" and not run.plan.deepspeed["fp16"].get("loss_scale")
    if spike is not None:
        reason = f"a spike of {spike.of}"
    elif not math.isfinite(loss):
        reason = "the loss is not finite"
    elif is_scaled:
        reason = "fp16 overflowed: the loss scale falls"
    scale = run.engine.loss_scale
    run.event(
        "skipped_step", step=step.number, reason=reason, loss=loss, grad_norm=norm, loss_scale=scale
    )
    # A dynamic loss scale either recovers or reaches its minimum, which stops the run.
    is_bad = spike is not None or not is_scaled
    run.judge.see_skipped(f"{reason} (loss {loss:.4g}, norm {norm:.4g})", is_bad)
