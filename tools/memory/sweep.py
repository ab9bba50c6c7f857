"""Peak memory over ranges of micro-batch, sequence length and GPU count."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from harness.estimate.fit import with_micro_batch
from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import GIB
from harness.estimate.timeline import Estimate, division_problems, estimate_memory

NAMES = ("micro_batch", "seq_len", "gpus")


@dataclass(frozen=True)
class Point:
    """One combination of a sweep, with its estimate."""

    values: dict[str, int]
    estimate: Estimate

    def to_json(self) -> dict[str, Any]:
        """Return the point as plain values."""
        return {
            **self.values,
            "peak_allocated_gib": round(self.estimate.worst.peak / GIB, 4),
            "peak_phase": self.estimate.worst.peak_phase,
            "verdict": self.estimate.verdict,
        }


def read_sweep(texts: Iterable[str]) -> dict[str, list[int]]:
    """Return the values of each range: "micro_batch=1..8" -> {"micro_batch": [1, 2, 4, 8]}.

    Each value is twice the previous one. Raises ValueError for other syntax.
    """
    ranges = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)=(\d+)(?:\.\.(\d+))?", text)
        if not match or match[1] not in NAMES or not 0 < int(match[2]) <= int(match[3] or match[2]):
            raise ValueError(
                f"--sweep {text}: write NAME=FROM..TO, NAME one of {', '.join(NAMES)}; any other "
                "key=value goes before --sweep"
            )
        value, last = int(match[2]), int(match[3] or match[2])
        values = [value]
        while values[-1] * 2 <= last:
            values.append(values[-1] * 2)
        ranges[match[1]] = values
    return ranges


def sweep(estimate: Estimate, ranges: dict[str, list[int]]) -> list[Point]:
    """Return an estimate for each combination; empty without ranges. Raises ValueError for one that
    the ranks cannot divide.
    """
    points = []
    for values in itertools.product(*ranges.values()) if ranges else ():
        chosen = dict(zip(ranges, values, strict=True))
        inputs = _with(estimate.inputs, chosen)
        if problems := division_problems(inputs):
            raise ValueError(f"--sweep: {'; '.join(problems)}")
        points.append(Point(chosen, estimate_memory(inputs, estimate.device_bytes)))
    return points


def _with(inputs: Inputs, values: dict[str, int]) -> Inputs:
    if "micro_batch" in values:
        inputs = with_micro_batch(inputs, values["micro_batch"])
    if "seq_len" in values:
        inputs = replace(inputs, seq_len=values["seq_len"])
    if "gpus" in values:
        inputs = replace(inputs, grid=replace(inputs.grid, world_size=values["gpus"]))
    return inputs


def sweep_text(points: list[Point]) -> str:
    """Return a line per combination."""
    lines = []
    for point in points:
        values = "  ".join(f"{name} {value:>7,}" for name, value in point.values.items())
        peak = point.estimate.worst.peak / GIB
        verdict = point.estimate.verdict
        lines.append(f"{values}  {peak:9.2f} GiB at {point.estimate.worst.peak_phase:16} {verdict}")
    return "\n".join(lines)
