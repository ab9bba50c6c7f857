"""Measures the pipeline bubble: the share of a step in which CPU ranks do not compute."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path

from harness.launch.ranks import run_module
from harness.layout.stages import bubble

MICRO_BATCHES = (4, 8, 16)


def measured(stages: int) -> str:
    """A table: predicted and measured idle share of a small model on `stages` CPU ranks.

    Measured is the median over steps of the mean over ranks; the optimizer step is left out.
    """
    lines = [
        f"Measured on {stages} CPU ranks, {len(os.sched_getaffinity(0))} cores, one thread each:",
        "  micro-batches   (p - 1) / (m + p - 1)   idle, measured",
    ]
    for count in MICRO_BATCHES:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch)
            arguments = [f"--stages={stages}", f"--micro-batches={count}", f"--out={out}"]
            run_module("tools.layout.worker", arguments, stages, errors=out)
            ranks = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
        idle = statistics.median(statistics.mean(step) for step in zip(*ranks, strict=True))
        lines.append(f"  {count:>13}   {bubble(stages, count):>21.1%}   {idle:>14.1%}")
    return "\n".join(lines)
