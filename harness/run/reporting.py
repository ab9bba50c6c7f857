"""Reports steps of a run: metrics lines, evaluations, memory and profile."""

from __future__ import annotations

import time
from typing import Any

from harness.engine.api import StepResult
from harness.run.attention import attention_metrics
from harness.run.diagnostics import record_memory, record_time
from harness.run.evaluation import (
    evaluate_by_position,
    evaluate_needles,
    evaluate_old,
    evaluate_sets,
)
from harness.run.meter import expert_load, monitor_events
from harness.run.run import Run, is_due
from harness.run.step import look_for_spike
from harness.steps import Step


def log_or_evaluate(run: Run, step: Step, result: StepResult | None) -> None:
    """Evaluate and write a metrics line if due. Collective; then also waits for the device."""
    if result is None:
        return
    config = run.plan.config
    evaluates = not run.steps.are_left or is_due(step.number, config.eval.every)
    if evaluates or is_due(step.number, config.log.every):
        loss = run.engine.sum_over_ranks(result.loss_share.detach().clone())
        scalars = expert_load(run.engine.expert_tokens())
        scalars |= run.source_losses.taken(run.engine.source_losses())
        scalars |= run.weights.taken(step.number)
        line = run.meter.line(loss, result.grad_norm, step.targets, scalars, learning_rate=step.lr)
        if config.log.is_due(step.number, config.log.attention_every):
            line |= attention_metrics(run)
        line |= evaluated(run) if evaluates else {}
        write_line(run, line)
        record_time(run, line)
        if config.guard.spikes == "log" and run.engine.step_applied:
            look_for_spike(run, step.number, step.reads, line["loss"], line["grad_norm"])
    record_memory(run)
    if run.profiler:
        run.pulse("profile", step.number)  # not part of the step time
        if run.profiler.after(step.number, step.batches[0]):
            run.meter.restart()


def evaluate_at_start(run: Run) -> None:
    """Evaluate before the first step, or after a stop that interrupted an evaluation.
    Collective.
    """
    step = run.state.step
    due = step == 0 or is_due(step, run.plan.config.eval.every)
    if due and run.held_out_nats is None and (line := evaluated(run)):
        write_line(run, line)


def evaluated(run: Run) -> dict[str, Any]:
    """Evaluate and return the fields of a metrics line; {} if interrupted. Collective."""
    loss, by_position = evaluate_by_position(run)
    if loss is None:
        return {}
    run.stability.see_evaluation(loss, run.state.step)
    of_sets = {**evaluate_sets(run), **evaluate_old(run)}
    needles = evaluate_needles(run)
    return {"eval_loss": loss, **of_sets, "loss_by_position": by_position, **needles}


def write_line(run: Run, line: dict[str, Any]) -> None:
    """Complete a metrics line, write it, show it, and pass it to trackers and the JSON's
    monitors.
    """
    line = {
        "unix_time_s": round(time.time(), 3),
        "step": run.state.step,
        "samples": run.state.samples,
        "tokens": run.state.tokens,
        "loss_scale": run.engine.loss_scale,
        "skipped_steps": run.engine.skipped_steps,
        **line,
    }
    if run.is_writer:
        run.folder.append_metrics(line)
        run.trackers.write(line)
        run.engine.write_monitors(monitor_events(line))
        run.progress.step(line)
        if "eval_loss" in line:
            run.pages.update()
