"""Estimates against runs of the harness itself on an H200 (measured_h200.toml)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.estimate.memory_item import GIB, Interval
from harness.estimate.step_time.machine import machine_of
from harness.estimate.step_time.step import estimate_time
from harness.estimate.timeline import Estimate
from harness.layout.world import World
from harness.plan.command import Command, plan_from
from tests.tables import beside

RUNS: list[dict[str, Any]] = beside(__file__, "measured_h200.toml")["run"]
MOVED_BEFORE = {1: (20, 16), 2: (40, 8), 3: (32, 0)}
"""Bytes per parameter, by ZeRO stage, that DeepSpeed's own code moves in addition
(engine/deepspeed_0_19/between_steps.py), in a step and for each further micro-batch: these runs
were measured with it."""
PLAIN = ("model.kernels=none", "model.compile=false")
LARGE = [run for run in RUNS if run["allocated_gib"] > 1]


def estimate_of(run: dict[str, Any]) -> Estimate:
    """Return the estimate of a run, from a plan for such a GPU."""
    json = Path(f"ds_configs/{run['json']}.json")
    world = World(accelerator="cuda", gpu="NVIDIA H200", torch="2.11.0")
    command = Command(json, assignments=(*PLAIN, *run["set"].split()))
    return plan_from(command, world=world, estimating=True).estimate


@pytest.mark.parametrize("run", LARGE, ids=lambda run: run["name"])
def test_memory_estimate_matches_h200_measurements(run: dict[str, Any]) -> None:
    estimate = estimate_of(run)
    allocated = estimate.worst.peak / GIB + run.get("unexplained_gib", 0)
    assert allocated == pytest.approx(run["allocated_gib"], rel=0.004)
    assert is_within(run["reserved_gib"], estimate.worst.reserved)
    if "shown_gib" in run:
        assert is_within(run["shown_gib"], estimate.worst.shown)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_step_time_estimate_matches_h200_measurements(run: dict[str, Any]) -> None:
    inputs = estimate_of(run).inputs
    if run.get("module_by_module"):
        inputs = replace(inputs, zero=replace(inputs.zero, has_leaves=True))
    if documents := run.get("document_tokens"):
        inputs = replace(inputs, seen_tokens=documents / 2)
    machine = machine_of("h200", 1, "bf16")
    seconds = estimate_time(inputs, machine).seconds
    once, more = MOVED_BEFORE[inputs.zero.stage]
    moved = (once + more * (inputs.grad_accum - 1)) * inputs.trained
    seconds += moved / machine.memory_rate
    assert seconds == pytest.approx(run["step_s"], rel=0.15)


def is_within(gib: float, interval: Interval) -> bool:
    """Return True if a number of GiB is in an interval of bytes."""
    return interval.low <= gib * GIB <= interval.high
