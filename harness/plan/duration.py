"""The predicted time of a plan's step, if its GPUs are known."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.config.assignments import MAX_FILE_BYTES
from harness.config.run_config import RunConfig
from harness.estimate.hardware import known_gpu
from harness.estimate.step_time.calibration import Site
from harness.estimate.step_time.host import kept_launch_ms
from harness.estimate.step_time.job import DAY, DISK_GB_PER_S, HOUR, EvalAndSaveTime, Job
from harness.estimate.step_time.machine import Machine, machine_of, measured, with_launches
from harness.estimate.step_time.step import TERMS, StepTime, estimate_time, terms_evidence
from harness.files.regular_file import read_json
from harness.plan.plan import Draft, Plan

_SHOWN = 3  # number of terms


def step_time(
    plan: Plan, rates: Mapping[str, Any] | None = None, seen_tokens: float | None = None
) -> StepTime | None:
    """Return the time of a step. None for CPUs without plan.rates, unknown or shared GPUs,
    architectures without an estimate, and runs whose steps have different numbers of tokens.

    `rates`: measured by preflight, used instead of the tables' unless plan.rates is set.
    `seen_tokens`: as in Inputs, if the data is known.
    """
    machine = _machine(plan)
    if machine is None or plan.estimate is None or not has_even_steps(plan):
        return None
    if rates and plan.site is None:
        machine = measured(machine, rates)
    return estimate_time(replace(plan.estimate.inputs, seen_tokens=seen_tokens), machine)


def has_even_steps(plan: Plan) -> bool:
    """Return True if every step computes the same number of tokens: no padding and no ramp."""
    return plan.config.data.batching == "packed" and not plan.curriculum.rises


def check_rates(draft: Draft) -> None:
    """Read the file of rates; reject an invalid one, or one for another kind of machine."""
    path, world = draft.config.plan.rates, draft.world
    if path is None:
        return
    try:
        draft.site = read_site(Path(path))
    except ValueError as error:
        draft.problems.add("plan.rates", f"but {error}")
        return
    gpu = None
    if world.accelerator == "cuda":
        in_table = known_gpu(world.gpu)
        gpu = in_table.key if in_table else world.gpu or "an unknown GPU"
    if why := draft.site.problem(gpu, draft.precision):
        draft.problems.add("plan.rates", f"but {why}")


def read_site(path: Path) -> Site:
    """Return the site that a file holds. Raises ValueError for any other file."""
    try:
        return Site.of(read_json(path, MAX_FILE_BYTES, links=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no rates of measured runs: {error}") from None


def _machine(plan: Plan) -> Machine | None:
    """Return the machine of a plan; None if its rates are unknown."""
    world, site = plan.world, plan.site
    if world.accelerator == "cpu":
        return site.machine(None, world.local_world_size) if site else None
    gpu = known_gpu(world.gpu)
    if gpu is None or world.ranks_per_gpu > 1:
        return None
    listed = machine_of(gpu.key, world.local_world_size, plan.products)
    if site:
        return site.machine(listed, world.local_world_size)
    milliseconds = kept_launch_ms(gpu.key) if plan.draft and plan.draft.here else None
    return with_launches(listed, milliseconds) if milliseconds else listed


def job_of(plan: Plan, step: StepTime) -> Job | None:
    """Return the steps and evaluations of the whole run as a job; None if its length is not known
    yet.
    """
    if plan.steps is None:
        return None
    return Job(
        plan.steps * step.seconds + beside_of(plan.config, step, plan.steps).evaluating,
        plan.grid.world_size,
        step.machine.watts,
    )


def beside_of(
    run: RunConfig, step: StepTime, steps: float, disk_gb_per_s: float = DISK_GB_PER_S
) -> EvalAndSaveTime:
    """Return the time of a run's evaluations and saves."""
    evaluate = run.eval.every, run.eval.samples, run.data.evaluated_sets
    return EvalAndSaveTime.of(step, steps, evaluate, run.save.every, disk_gb_per_s)


def step_line(step: StepTime) -> str:
    """Return the time of a step and its largest terms, on one line."""
    largest = ", ".join(shares_of(step)[:_SHOWN])
    return (
        f"{step.seconds:.3g} s per step ({largest}), {step.tokens_per_s_per_gpu:,.0f} tokens/s "
        f"per GPU, MFU {step.mfu:.0%} ({step.evidence})"
    )


def shares_of(step: StepTime) -> list[str]:
    """Return the terms of a step with their shares, largest first; a guessed term says so."""
    evidence = terms_evidence(step.terms, step.inputs, step.machine)
    return [
        f"{TERMS[name]} {seconds / step.seconds:.0%}"
        + (" [guessed]" if evidence[name] == "guessed" else "")
        for name, seconds in sorted(step.terms.items(), key=lambda term: -term[1])
        if seconds >= 0.01 * step.seconds
    ]


def time_line(plan: Plan, step: StepTime) -> str:
    """Return step_line with the time of the whole run."""
    job = job_of(plan, step)
    if job is None:
        return step_line(step)
    beside = beside_of(plan.config, step, plan.steps or 0)
    saves = f"{beside.saves or 'each'} save{'s' * (beside.saves > 1)} of {beside.save_text}"
    evaluations = f"{beside.evaluations:,} evaluations included ({beside.evaluating:,.4g} s in all)"
    return (
        f"{step_line(step)}; {length(job.seconds)} in total, {job.gpu_hours:,.3g} GPU-hours "
        "without "
        f"failures, {evaluations}; plus {saves} (guessed: {DISK_GB_PER_S:g} GB/s per node)"
    )


def length(seconds: float) -> str:
    """Return seconds as days, hours or minutes, as text."""
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:,.1f} days"
    return f"{seconds / HOUR:.1f} hours" if seconds >= 2 * HOUR else f"{seconds / 60:.0f} minutes"
