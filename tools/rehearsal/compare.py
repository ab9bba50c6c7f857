"""Compares two runs of one job, step by step, by their metrics.jsonl."""

from __future__ import annotations

import math
from typing import Any

Line = dict[str, Any]

# Results of a step and its position in the run, but not its duration.
EXACT = (
    *("loss", "grad_norm", "learning_rate", "samples", "tokens"),
    *("loss_scale", "skipped_steps", "eval_loss"),
)


def differing(lines: list[Line], expected: list[Line]) -> list[str]:
    """Return every difference of two runs in EXACT, to the last bit, and steps that one run
    lacks.
    """
    here, there = by_step(lines), by_step(expected)
    problems = [
        f"step {step} is in only one of the two runs" for step in sorted(here.keys() ^ there.keys())
    ]
    for step in sorted(here.keys() & there.keys()):
        problems += [
            f"{key} of step {step} is {here[step].get(key)!r}, not {there[step].get(key)!r}"
            for key in EXACT
            if here[step].get(key) != there[step].get(key)
        ]
    return problems


def done_twice(lines: list[Line], stopped_at: int) -> list[int]:
    """Return the steps that the second attempt repeated, or left to the first."""
    return [
        step
        for step, line in by_step(lines).items()
        if line["attempt"] != (1 if step <= stopped_at else 2)
    ]


def apart(ours: list[Line], expected: list[Line], steps: list[int], key: str) -> float:
    """Return the largest relative difference of `key` over these steps; NaN if one is not finite.

    A step that has null in both runs counts as equal.
    """
    here, there = by_step(ours), by_step(expected)
    worst = 0.0
    for step in steps:
        mine, theirs = (lines.get(step, {}).get(key, math.nan) for lines in (here, there))
        if mine is None and theirs is None:
            continue
        mine, theirs = (math.nan if value is None else value for value in (mine, theirs))
        if not math.isfinite(mine - theirs):
            return math.nan
        worst = max(worst, abs(mine - theirs) / max(abs(theirs), 1e-30))
    return worst


def by_step(lines: list[Line]) -> dict[int, Line]:
    """Return the lines of training steps by step; the line of step 0 is an evaluation."""
    return {line["step"]: line for line in lines if "loss" in line}
