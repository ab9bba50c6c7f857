"""Parity: every layout learns on this device what a plain PyTorch loop learns on it."""

import math
import re
from typing import Any

from harness.runfolder import RunFolder
from tools.acceptance.bench import Bench, Failed, expect

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
"""Layouts that overlap transfers with computation."""
_PAIR = re.compile(r"(\w+) (\S+)/(\S+?)(!?)(?= |$)")  # "loss 1.0e-05/2.0e-04"


def look(bench: Bench) -> str:
    """Compare the gate's own cells; discard a step, and roll back."""
    worst = [0.0]
    cells = {name: cell_of(*name, ranks=bench.power_of_two) for name in _CELLS}
    able = [cell for (_, layout, _), cell in cells.items() if _stages(layout) <= bench.ranks]
    racing = {name[1]: cell for name, cell in cells.items() if name[1] in _RACING}
    gate = Compared(bench, "cells")
    bench.check("train every layout", gate.compare, able)
    for (_, layout, precision), cell in cells.items():
        bench.check(f"{layout} in {precision}", gate.judge, layout, cell, worst)
    bench.check("a loss that is NaN", _discarded, bench)
    bench.check("roll back after a spike", _rolled_back, bench)
    gate = Compared(bench, "blocking", CUDA_LAUNCH_BLOCKING="1")
    if bench.on_cuda:
        bench.check("train with CUDA_LAUNCH_BLOCKING=1", gate.compare, [*racing.values()])
    for layout, cell in racing.items():
        name = f"{layout} with CUDA_LAUNCH_BLOCKING=1"
        bench.check(name, _blocking, bench, gate, layout, cell, worst)
    bench.values["worst_of_allowed"] = worst[0]
    return f"differences at most {worst[0]:.2f} of what is allowed"


def cell_of(architecture: str, layout: str, precision: str, ranks: int) -> str:
    """Return the name of the gate's cell: with four micro-batches, if there are enough samples."""
    data_ranks = max(1, ranks // _stages(layout))
    return f"{architecture}-{layout}-{precision}-{min(4, _GLOBAL_BATCH // data_ranks)}-{ranks}"


def _stages(layout: str) -> int:
    return 2 if layout.startswith("pipe2") else 1


class Compared:
    """Cells that the parity gate trains and compares in a folder of the bench."""

    def __init__(self, bench: Bench, folder: str, **variables: str) -> None:
        """`variables`: added to the ranks' environment."""
        self._bench, self._folder, self._variables = bench, folder, variables
        self.lines: dict[str, str] = {}  # of the gate, by cell

    def compare(self, cells: list[str]) -> str:
        """Train cells in one launch and compare them. Raises Failed if a rank fails."""
        words = ["--cells", *cells, "--out", str(self._bench.folder / self._folder)]
        words += ["--gpu"] * self._bench.on_cuda
        _, printed, error = self._bench.gate("check_parity", *words, **self._variables)
        self.lines |= {line.partition(" ")[0]: line for line in printed}
        if any(cell not in self.lines for cell in cells):
            raise Failed(error)
        return f"{len(cells)} layouts"

    def judge(self, layout: str, cell: str, worst: list[float]) -> str:
        """Judge a cell. If not all could be trained together, it is trained alone."""
        if _stages(layout) > self._bench.ranks:
            self._bench.require_two_ranks()
        if cell not in self.lines:
            self.compare([cell])
        pairs = [(n, float(a), float(b), mark) for n, a, b, mark in _PAIR.findall(self.lines[cell])]
        parts = {name: math.inf if math.isnan(a) else a / b for name, a, b, _ in pairs}
        name, distance, allowed, _ = max(pairs, key=lambda pair: parts[pair[0]])
        text = f"{name} differs by {distance:.1e}, {allowed:.1e} is allowed"
        expect(not any(mark for *_, mark in pairs), text)
        worst[0] = max(worst[0], parts[name])
        return text


def _blocking(bench: Bench, gate: Compared, layout: str, cell: str, worst: list[float]) -> str:
    """Make the host wait for every kernel: a run that then learns something else has a race."""
    bench.require_cuda()
    text = gate.judge(layout, cell, worst)
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
    return "skipped on all ranks; training continues"


def _rolled_back(bench: Bench) -> str:
    fault = {"rank": bench.ranks - 1, "step": 9, "do": "spike"}
    # The first four steps are not judged, and only a value far off is a spike.
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
