"""Parity: every layout learns on this device what a plain PyTorch loop learns on it."""

from __future__ import annotations

import math
import re
from typing import Any

from harness.runfolder import RunFolder
from tools.acceptance.bench import Bench, Failed, expect

_STAGES = {"pipe2_zero1": 2}
_GLOBAL_BATCH = 8  # samples, of the gate
# The plain loop is trained once for each architecture and precision.
_CELLS = (
    ("llama", "zero0", "fp32"),
    ("llama", "zero1", "bf16"),
    ("llama", "zero2", "bf16"),
    ("llama", "zero3", "bf16"),
    ("llama", "zero2_offload", "bf16"),
    ("llama_deep", "pipe2_zero1", "fp32"),
    ("llama_deep", "pipe2_zero1", "bf16"),
)
_RACING = ("zero2", "zero3", "zero2_offload")
"""Layouts whose transfers run beside their computation."""
_BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
_PAIR = re.compile(r"(\w+) (\S+)/(\S+?)(!?)(?= |$)")  # "loss 1.0e-05/2.0e-04"


def look(bench: Bench) -> str:
    """Compare the gate's own cells; discard a step, and roll back."""
    worst = [0.0]
    cells = {name: cell_of(*name, ranks=bench.power_of_two) for name in _CELLS}
    able = [cell for (_, layout, _), cell in cells.items() if _can_run(layout, bench)]
    racing = {name[1]: cell for name, cell in cells.items() if name[1] in _RACING}
    lines: dict[str, str] = {}
    bench.check("train every layout", _compare_all, bench, able, lines)
    for (_, layout, precision), cell in cells.items():
        bench.check(f"{layout} in {precision}", _equal, bench, layout, cell, lines, worst)
    bench.check("a loss that is NaN", _discarded, bench)
    bench.check("roll back after a spike", _rolled_back, bench)
    lines = {}
    if bench.on_cuda:
        name = "train with CUDA_LAUNCH_BLOCKING=1"
        bench.check(name, _compare_all, bench, [*racing.values()], lines, "blocking")
    for layout, cell in racing.items():
        name = f"{layout} with CUDA_LAUNCH_BLOCKING=1"
        bench.check(name, _blocking, bench, layout, cell, lines, worst)
    bench.values["worst_of_allowed"] = worst[0]
    return f"differences at most {worst[0]:.2f} of what is allowed"


def cell_of(architecture: str, layout: str, precision: str, ranks: int) -> str:
    """Return the name of the gate's cell: with four micro-batches, if there are samples."""
    data_ranks = max(1, ranks // _STAGES.get(layout, 1))
    return f"{architecture}-{layout}-{precision}-{min(4, _GLOBAL_BATCH // data_ranks)}-{ranks}"


def _can_run(layout: str, bench: Bench) -> bool:
    return _STAGES.get(layout, 1) <= bench.ranks


def _compare_all(
    bench: Bench, cells: list[str], lines: dict[str, str], folder: str = "cells"
) -> str:
    """Train and compare cells in one launch; put the gate's line about each into `lines`."""
    words = ["--cells", *cells, "--out", str(bench.folder / folder), *["--gpu"] * bench.on_cuda]
    _, printed, error = bench.gate(
        "check_parity", *words, **_BLOCKING if folder == "blocking" else {}
    )
    by_name = {line.partition(" ")[0]: line for line in printed}
    lines |= {cell: by_name[cell] for cell in cells if cell in by_name}
    if len(lines) < len(cells):  # a rank failed
        raise Failed(error)
    return f"{len(cells)} layouts"


def _equal(
    bench: Bench, layout: str, cell: str, lines: dict[str, str], worst: list[float],
    folder: str = "cells",
) -> str:  # fmt: skip
    """Judge a cell. If not all could be trained together, it is trained alone."""
    if not _can_run(layout, bench):
        bench.two_ranks()
    if cell not in lines:
        _compare_all(bench, [cell], lines, folder)
    pairs = [(name, float(a), float(b), mark) for name, a, b, mark in _PAIR.findall(lines[cell])]
    parts = {name: math.inf if math.isnan(a) else a / b for name, a, b, _ in pairs}
    name, distance, allowed, _ = max(pairs, key=lambda pair: parts[pair[0]])
    text = f"{name} differs by {distance:.1e}, {allowed:.1e} is allowed"
    expect(not any(mark for *_, mark in pairs), text)
    worst[0] = max(worst[0], parts[name])
    return text


def _blocking(
    bench: Bench, layout: str, cell: str, lines: dict[str, str], worst: list[float]
) -> str:
    """Let the host wait for every kernel: a run that learns something else then has a race."""
    bench.cuda_only()
    text = _equal(bench, layout, cell, lines, worst, "blocking")
    paths = [bench.folder / name / f"{cell}.json" for name in ("cells", "blocking")]
    alike = len({path.read_bytes() if path.exists() else None for path in paths}) == 1
    return f"losses {'equal bit for bit' if alike else f'within rounding: {text}'}"


def _discarded(bench: Bench) -> str:
    fault = {"rank": bench.ranks - 1, "step": 3, "do": "nan"}
    run = _trained(bench, "nan", fault, "train.steps=5", "save.every=0")
    (event,) = _events(run, "skipped_step")
    expect(event["step"] == 3, f"step {event['step']} was skipped, not 3")
    expect("the loss is not finite" in event["reason"], event["reason"])
    last = run.read_metrics()[-1]
    expect(math.isfinite(last["loss"]), f"the last loss is {last['loss']}")
    return "skipped on all ranks; training goes on"


def _rolled_back(bench: Bench) -> str:
    fault = {"rank": bench.ranks - 1, "step": 9, "do": "spike"}
    # Silent for four steps, and only what is far off is a spike.
    watched = ("guard.spike_window=16", "guard.spike_sigma=12", "guard.spikes=rollback")
    run = _trained(bench, "spike", fault, "train.steps=10", "save.every=5", *watched)
    (event,) = _events(run, "rollback")
    expect((event["from_step"], event["to_step"]) == (9, 5), f"{event}")
    return "from step 9 to the checkpoint of step 5"


def _trained(bench: Bench, name: str, fault: dict[str, Any], *settings: str) -> RunFolder:
    run = RunFolder(bench.folder / name / "run")
    bench.train(run, *settings, name=name, json_name="zero2", fault=fault)
    return run


def _events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    events = [event for event in run.read_events() if event["kind"] == kind]
    expect(len(events) == 1, f"{len(events)} events are {kind}, not 1")
    return events
