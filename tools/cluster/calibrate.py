"""Fits a site's hardware rates to the measured steps of its own runs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import median
from typing import Any

from harness.config.assignments import assign
from harness.config.ds_json import DsJson
from harness.config.run_file import validated
from harness.errors import ConfigError
from harness.estimate.step_time.calibration import Measured, calibrated
from harness.layout.world import World
from harness.plan.duration import has_even_steps
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.runfolder import RunFolder

_LEAST = 3
"""Minimum number of metrics lines of a run; the first is left out."""


def calibrate(folders: Sequence[Path], out: Path) -> str:
    """Fit a site's rates to its runs, write them, and return a line about them.

    Raises ConfigError for a folder without a usable run, and for runs on different machines.
    """
    problems, runs, kinds = [], list[Measured](), set[tuple[str, str, int]]()
    for folder in folders:
        try:
            measured, cores = _measured(folder)
        except (ValueError, OSError, KeyError, TypeError) as error:
            problems.append(f"--calibrate {folder}: {error}")
            continue
        runs.append(measured)
        kinds.add((measured.inputs.gpu or "cpu", measured.inputs.precision, cores))
    if len(kinds) > 1:
        others = "; ".join(
            f"{gpu} in {precision}" + (f", {cores} cores" if cores else "")
            for gpu, precision, cores in sorted(kinds)
        )
        problems.append(f"--calibrate: runs on different machines or precisions: {others}")
    if problems:
        raise ConfigError(problems)
    ((_, _, cores),) = kinds
    site = calibrated(runs, cores)
    site.write(out)
    changed = ", ".join(f"{name} x {factor:.3g}" for name, factor in site.factors.items())
    return (
        f"{out}: {len(runs)} runs, median error {site.median_error:.1%} after the fit; "
        f"{changed or 'nothing changed'}"
    )


def _measured(folder: Path) -> tuple[Measured, int]:
    """Return a run's inputs and median step time, and a node's cores; 0 for nodes with GPUs."""
    run = RunFolder(folder)
    record = run.read_plan()
    if record is None:
        raise ValueError("there is no plan.json")
    plan = _plan_of(record)
    if plan.estimate is None:
        raise ValueError("its architecture is unknown")
    inputs = replace(plan.estimate.inputs, seen_tokens=record.get("seen_tokens"))
    if not has_even_steps(plan):
        raise ValueError("its steps have different numbers of tokens (ramp.*, data.batching)")
    if (record.get("world") or {}).get("ranks_per_gpu", 1) > 1:
        raise ValueError("its ranks shared GPUs, so its times say nothing about them")
    if plan.world.accelerator == "cuda" and inputs.gpu is None:
        raise ValueError(f"its GPUs are unknown: {plan.world.gpu}")
    lines = run.read_metrics()
    seconds = [float(line["step_time_s"]) for line in lines if line.get("step_time_s")]
    if len(seconds) < _LEAST:
        raise ValueError(f"{len(seconds)} metrics lines: at least {_LEAST} are needed (log.every)")
    cores = record["cores"] if inputs.gpu is None else 0
    return Measured(inputs, median(seconds[1:])), cores


def _plan_of(record: dict[str, Any]) -> Plan:
    """Return a run's plan, rebuilt from the keys that its user set."""
    tree: dict[str, Any] = {}
    for key in record["run_set"]:
        if key not in ("run.dir", "plan.rates"):
            assign(tree, key, reduce(getitem, key.split("."), record["run"]))
    for key in ("model.kernels", "model.compile"):  # as they were chosen then
        assign(tree, key, reduce(getitem, key.split("."), record["run"]))
    assign(tree, "train.micro_batch", record["micro_batch"])
    config = validated(tree, record["run_set"])
    ds = DsJson(record["deepspeed_given"], record["deepspeed_source"])
    return make_plan(config, ds, World(**record["world"]), estimating=True)
