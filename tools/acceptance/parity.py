"""Parity: every layout learns on this device what a plain PyTorch loop learns on it."""

from __future__ import annotations

import math
from typing import Any

from harness.runfolder import RunFolder
from tests.gates.cells import GLOBAL_BATCH, LAYOUTS
from tests.gates.parity.cells import Cell, Job
from tools.acceptance.bench import ON_CUDA, Bench, Failed, expect

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


def look(bench: Bench) -> str:
    """Compare the gate's own cells; discard a step, and roll back."""
    worst = [0.0]
    cells = [cell_of(*names, ranks=bench.power_of_two) for names in _CELLS]
    bench.check("train every layout", _trained_together, bench, cells, "cells", {})
    for cell in cells:
        bench.check(f"{cell.layout} in {cell.precision}", _equal, bench, cell, worst)
    bench.check("a loss that is NaN", _discarded, bench)
    bench.check("roll back after a spike", _rolled_back, bench)
    racing = [cell for cell in cells if cell.layout in _RACING]
    if bench.on_cuda:
        name = "train with CUDA_LAUNCH_BLOCKING=1"
        bench.check(name, _trained_together, bench, racing, "blocking", _BLOCKING)
    for cell in racing:
        name = f"{cell.layout} with CUDA_LAUNCH_BLOCKING=1"
        bench.check(name, _blocking, bench, cell, worst)
    bench.values["worst_of_allowed"] = worst[0]
    return f"differences at most {worst[0]:.2f} of what is allowed"


def cell_of(architecture: str, layout: str, precision: str, ranks: int) -> Cell:
    """Return the gate's cell on so many ranks: with four micro-batches, if there are samples."""
    data_ranks = max(1, ranks // LAYOUTS[layout].pipeline)
    return Cell(architecture, layout, precision, min(4, GLOBAL_BATCH // data_ranks), ranks)


def _trained_together(bench: Bench, cells: list[Cell], folder: str, env: dict[str, str]) -> str:
    """Train the cells that fit these ranks in one launch; if it fails, each is tried alone."""
    from tests.gates.check_parity import train

    able = [cell for cell in cells if cell.how.pipeline <= cell.ranks]
    out = bench.folder / folder
    out.mkdir()
    try:
        train([Job(cell) for cell in able], out, {**ON_CUDA, **env} if bench.on_cuda else None)
    except SystemExit as ended:  # with what a rank wrote
        raise Failed(_last_line(ended)) from ended
    return f"{len(able)} layouts"


def _equal(bench: Bench, cell: Cell, worst: list[float], folder: str = "cells", **env: str) -> str:
    """Train a cell, if it was not, and compare it."""
    from tests.gates.check_parity import check
    from tests.gates.jobs import compute_alike

    if cell.how.pipeline > cell.ranks:
        bench.two_ranks()
    compute_alike()
    out = bench.folder / folder
    out.mkdir(exist_ok=True)
    on_gpus = {**ON_CUDA, **env} if bench.on_cuda else None
    try:
        (row,) = check([cell], out, False, on_gpus)
    except SystemExit as ended:  # with what a rank wrote
        raise Failed(_last_line(ended)) from ended
    parts = {
        name: distance / allowed
        for (name, distance), allowed in zip(
            vars(row.distance).items(), vars(row.tolerance).values(), strict=True
        )
    }
    name = max(parts, key=lambda key: math.inf if math.isnan(parts[key]) else parts[key])
    text = f"{name} differs by {getattr(row.distance, name):.1e}, "
    text += f"{getattr(row.tolerance, name):.1e} is allowed"
    expect(not row.failures, text)
    worst[0] = max(worst[0], parts[name])
    return text


def _last_line(ended: SystemExit) -> str:
    return str(ended).strip().rpartition("\n")[2]


def _blocking(bench: Bench, cell: Cell, worst: list[float]) -> str:
    """Let the host wait for every kernel: a run that learns something else then has a race."""
    bench.cuda_only()
    text = _equal(bench, cell, worst, "blocking", **_BLOCKING)
    paths = [bench.folder / name / f"{cell.name}.json" for name in ("cells", "blocking")]
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
    return "skipped on all ranks; training continues"


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
