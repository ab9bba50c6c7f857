"""Reports a run's steps: metrics lines, evaluations, memory and profile."""

from __future__ import annotations

from typing import Any

from harness.engine.api import StepResult
from harness.run.evaluation import evaluate
from harness.run.meter import monitor_events
from harness.run.noting import note_memory
from harness.run.run import Run, is_due
from harness.run.stepping import look_for_spike
from harness.steps import Step


def log_or_evaluate(run: Run, step: Step, result: StepResult | None) -> None:
    """Evaluate and write a metrics line if either is due. Collective, and waits for the device."""
    if result is None:
        return
    config = run.plan.config
    evaluates = not run.steps.are_left or is_due(step.number, config.eval.every)
    if evaluates or is_due(step.number, config.log.every):
        line = run.meter.line(
            result.loss_share, result.grad_norm, step.targets, learning_rate=step.lr
        )
        line |= evaluated(run) if evaluates else {}
        write_line(run, line)
        if config.guard.spikes == "log" and run.engine.step_applied:
            look_for_spike(run, step.number, step.reads, line["loss"], line["grad_norm"])
    note_memory(run)
    if run.profiler:
        run.pulse("profile", step.number)  # the profile is no part of a step
        if run.profiler.after(step.number, step.batches[0]):
            run.meter.restart()


def evaluate_at_start(run: Run) -> None:
    """Evaluate before the first step, or if a stop interrupted an evaluation. Collective."""
    step = run.state.step
    due = step == 0 or is_due(step, run.plan.config.eval.every)
    if due and run.held_out_nats is None and (line := evaluated(run)):
        write_line(run, line)


def evaluated(run: Run) -> dict[str, float]:
    """Evaluate; return the fields for a metrics line, none if it was interrupted. Collective."""
    loss = evaluate(run)
    if loss is None:
        return {}
    run.judge.see_evaluation(loss, run.state.step)
    return {"eval_loss": loss}


def write_line(run: Run, line: dict[str, Any]) -> None:
    """Complete a metrics line, write it, show it, and pass it to the JSON's monitors."""
    line = {
        "step": run.state.step,
        "samples": run.state.samples,
        "tokens": run.state.tokens,
        "loss_scale": run.engine.loss_scale,
        "skipped_steps": run.engine.skipped_steps,
        **line,
    }
    if run.is_writer:
        run.folder.append_metrics(line)
        run.engine.write_monitors(monitor_events(line))
        run.progress.step(line)
