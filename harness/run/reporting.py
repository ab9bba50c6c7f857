"""Metrics lines and evaluations of a run, and what is said when memory runs out."""

import sys
import time
from typing import Any

import torch

from harness.engine.api import StepResult
from harness.estimate.fit import changes_that_help, memory_line
from harness.plan.make import takes
from harness.run.evaluation import evaluate_by_position, evaluate_needles, evaluate_sets
from harness.run.meter import monitor_events
from harness.run.preferences import evaluated_pairs
from harness.run.run import Run, is_due
from harness.run.step import look_for_spike
from harness.steps import Step


def log_or_evaluate(run: Run, step: Step, result: StepResult | None) -> None:
    """Evaluate and write a metrics line if due. Collective; then also waits for the device."""
    if result is None:
        return
    config, line = run.plan.config, None
    evaluates = not run.steps.are_left or is_due(step.number, config.eval.every)
    if evaluates or is_due(step.number, config.log.every):
        line = _line(run, step, result) | (evaluated(run) if evaluates else {})
        write_line(run, line)
        if config.guard.spikes == "log" and run.engine.step_applied:
            look_for_spike(run, step.number, step.reads, line["loss"], line["grad_norm"])
    for instrument in run.instruments:
        instrument.after(step, line)


def _line(run: Run, step: Step, result: StepResult) -> dict[str, Any]:
    """Return a step's fields of a metrics line. Collective; waits for the device."""
    loss = run.engine.sum_over_ranks(result.loss_share.detach().clone())
    values: dict[str, torch.Tensor] = {}
    for instrument in run.instruments:
        values |= instrument.values(step)
    line = run.meter.line(loss, result.grad_norm, step.targets, values, learning_rate=step.lr)
    for instrument in run.instruments:
        line |= instrument.line(step)
    return line


def evaluate_at_start(run: Run) -> None:
    """Evaluate before the first step, or at a resumed step whose evaluation a stop interrupted.
    Collective.
    """
    step = run.state.step
    if step == 0 or is_due(step, run.plan.config.eval.every):
        evaluate_weights(run)


def evaluate_weights(run: Run) -> None:
    """Evaluate the current weights and write a line, unless they have been. Collective."""
    if run.held_out_nats is None and (line := evaluated(run)):
        write_line(run, line)


def evaluated(run: Run) -> dict[str, Any]:
    """Evaluate and return the fields of a metrics line; {} if interrupted. Collective."""
    evaluated_pairs(run)  # of other evaluations
    loss, by_position = evaluate_by_position(run)
    if loss is None:
        return {}
    run.stability.see_evaluation(loss, run.state.step)
    pairs = evaluated_pairs(run)
    of_sets, needles = evaluate_sets(run), evaluate_needles(run)
    return {"eval_loss": loss, **pairs, **of_sets, "loss_by_position": by_position, **needles}


def write_line(run: Run, line: dict[str, Any]) -> None:
    """Complete a metrics line, write and show it; pass it to trackers and monitors."""
    line = {
        "unix_time_s": round(time.time(), 3),
        "step": run.state.step,
        "samples": run.state.samples,
        "tokens": run.state.tokens,
        "loss_scale": run.engine.loss_scale,
        "skipped_steps": run.engine.skipped_steps,
        "gpu_hours": round(run.folder.gpu_hours, 6),
        **line,
    }
    if run.is_writer:
        run.folder.append_metrics(line)
        run.trackers.write(line)
        run.engine.write_monitors(monitor_events(line))
        run.progress.step(line)
        if "eval_loss" in line:
            run.pages.update()


def explain_out_of_memory(run: Run) -> None:
    """Report the estimate, the memory in use and changes that help, on the rank that ran out."""
    estimate, device, rank = run.plan.estimate, run.engine.device, run.plan.world.rank
    total = None
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1] // run.plan.world.ranks_per_gpu
    place = run.plan.grid.described(rank)
    lines = [f"rank {rank}{place} ran out of memory after step {run.state.step}"]
    if estimate is not None:
        lines += [
            f"expected: {memory_line(estimate)}",
            changes_that_help(estimate, total, takes(run.plan)),
        ]
    message = "; ".join(lines)
    run.folder.append_failure(rank, "out_of_memory", step=run.state.step, message=message)
    if total is not None:  # kilobytes, too long for an event
        lines.insert(1, torch.cuda.memory_summary(device, abbreviated=True))
    print(*lines, sep="\n", file=sys.stderr, flush=True)
