"""Waits: in a step of the loop the host waits for the device only where DeepSpeed makes it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from harness.launch.ranks import REPOSITORY
from tools.acceptance.bench import Bench, Failed, expect
from tools.acceptance.report import readable
from tools.speed.cases import Case, measured

_JSONS = ("zero1", "zero2", "zero3")
_SIMULATED = ("zero1", "zero3")
_OWN = "harness/"
MOST = {"zero1": 4, "zero2": 9, "zero3": 5}
"""Waits of a step with one micro-batch beside RUN_AHEAD, as simulated (docs/host_waits.md)."""
RUN_AHEAD = (
    "deepspeed/runtime/zero/partition_parameters.py:84",  # these two of a rank alone
    "deepspeed/runtime/zero/partition_parameters.py:114",
    "deepspeed/runtime/zero/partitioned_param_coordinator.py",
    "deepspeed/runtime/zero/stage3.py:1667",
)
"""Waits by which ZeRO 3 bounds its look-ahead, for work done: as many as a model has weights, of a
rank alone twice as many."""


def look(bench: Bench) -> str:
    """Count the waits of one step for each JSON: on GPUs as torch reports them, else simulated."""
    counts: dict[str, int] = {}
    for name in _JSONS:
        bench.check(name, lambda name=name: _counted(bench, name, counts))
    if not bench.on_cuda:
        bench.check("a simulated device", lambda: _simulated(bench))
        return str(bench.values.get("simulated", [""])[-1])
    return ", ".join(f"{name} {count} waits a step" for name, count in counts.items())


def _counted(bench: Bench, name: str, counts: dict[str, int]) -> str:
    bench.cuda_only()
    settings = dict(text.split("=", 1) for text in bench.settings)
    settings.pop("train.global_batch")
    settings.pop("log.every")  # whose line is the one place where the host is to wait
    line: dict[str, Any] = measured(
        Case(name, settings), REPOSITORY / "ds_configs" / f"{name}.json", bench.ranks, 3, 4
    )
    if "host_waits" not in line:
        raise Failed(line.get("refused") or line.get("error") or "nothing was measured")
    places = bench.values[name] = line["host_waits"]
    own = [place for place in places if place.startswith(_OWN)]
    expect(not own, f"the harness waits in {', '.join(own)}")
    counts[name] = line["host_waits_per_step"]
    text = f"{counts[name]} waits a step: {', '.join(places)}"
    drains = sum(count for place, count in places.items() if not place.startswith(RUN_AHEAD))
    expect(drains <= MOST[name], f"{drains} of them drain the device, not {MOST[name]}: {text}")
    return text


def _simulated(bench: Bench) -> str:
    """Run CPU ranks whose device has streams: what races, or waits without need, fails."""
    bench.two_ranks()
    done = subprocess.run(
        [sys.executable, "-m", "tests.gates.check_streams", "--cells", *_SIMULATED],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    lines = bench.values["simulated"] = [readable(line) for line in done.stdout.splitlines()]
    expect(done.returncode == 0, f"it ended with code {done.returncode}: {'; '.join(lines)}")
    return "; ".join(lines)
