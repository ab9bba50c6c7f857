"""Check that a checkpoint loses nothing between layouts: save, load elsewhere, save again, compare.

    python -m tests.gates.check_checkpoints                       # a covering set of cells
    python -m tests.gates.check_checkpoints --full --out FOLDER   # every cell; resumes
    python -m tests.gates.check_checkpoints --cells fp32-llama-zero1x2-zero3x1
    python -m tests.gates.check_checkpoints --self-test           # plants defects: all must show

A cell is PRECISION-ARCHITECTURE-SOURCE-TARGET, a side is LAYOUTxRANKS. The source trains three
steps (in fp16 the first one overflows), saves, and trains three more. The target is built with
zeros, loads, and saves again: every tensor and number of the two checkpoints must be bit-equal.
Then it takes the same three steps. With the source's own layout, losses and gradient norms must be
bit-equal. With another layout, they may differ by 5 times the effect of the order of sums alone
(measured on the tied Llama with ZeRO 1 on one rank and other micro-batches; in bf16 also with sums
in bf16). Exit code 1 if a cell differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.gates.checkpoints.cells import Cell, Side, all_cells, covering_cells
from tests.gates.checkpoints.compare import Apart, apart
from tests.gates.checkpoints.defects import DEFECTS
from tests.gates.checkpoints.worker import Job
from tests.gates.jobs import Group, run_jobs
from tests.gates.matrix import chosen, is_missed, matrix_arguments, same_versions, self_test_result
from tests.gates.models import EVERYWHERE, MIXTURE, SAVED, SHARED, WIDE
from tools.made_with import versions

TOLERANCE_FACTOR = 5.0
ROUNDING = 2.0**-23  # fp32's last place; two correct sums may differ by it
YARDSTICK = Side("zero1", 1)
OTHER_SPLITS = (8, 1)  # samples per micro-batch; the yardstick has 4


@dataclass(frozen=True)
class Row:
    """The verdict on one cell."""

    cell: Cell
    lost: list[str]
    """Differences between the two checkpoints, and tensors missing from both."""
    apart: Apart
    limit: Apart

    @property
    def failures(self) -> list[str]:
        """All conditions that the cell violates."""
        return [*self.lost, *self.apart.exceeds(self.limit)]

    def line(self) -> str:
        """Return a line: tensors, measured/allowed of losses and norms, the failures."""
        allowed = vars(self.limit)
        pairs = [f"{name} {x:.0e}/{allowed[name]:.0e}" for name, x in vars(self.apart).items()]
        tensors = "tensors LOST" if self.lost else "tensors exact"
        verdict = "DIFFERS: " + "; ".join(self.failures[:3]) if self.failures else "equal"
        return f"{self.cell.name:60} {tensors}  {'  '.join(pairs)}  {verdict}"


def main() -> int:
    """Run the command; return its exit code."""
    args = matrix_arguments(__doc__, "checkpoints and losses")
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        _prepare(out)
        if args.self_test:
            return _self_test(out)
        rows = check(chosen(args, all_cells(), covering_cells()), out)
    print(summary(rows))
    print(_tolerances(rows))
    print(versions())
    return 1 if any(row.failures for row in rows) else 0


def check(cells: list[Cell], out: Path) -> list[Row]:
    """Run the jobs missing in `out`, compare everything, print a line per cell."""
    _do([_load(cell) for cell in cells] + _yardsticks(cells), out)
    rows = [_compared(cell, _load(cell), out) for cell in cells]
    for row in rows:
        print(row.line(), flush=True)
    return rows


def _do(loads: list[Job], out: Path) -> None:
    """Run the missing jobs. All saves that are loaded later come first, on any number of ranks."""
    saves = [Job(job.precision, job.architecture, job.source) for job in loads]
    every = dict.fromkeys((*saves, *loads))
    missing = [job for job in every if not (out / job.result).exists()]
    run_jobs("checkpoints", missing, out, lambda job: Group(int(bool(job.target)), job.side.ranks))


def _load(cell: Cell, defect: str | None = None) -> Job:
    return Job(cell.precision, cell.architecture, cell.source, cell.target, defect=defect)


def _yardsticks(cells: list[Cell]) -> list[Job]:
    """Return the jobs that measure the effect of the order of sums, for cells that change
    layout.
    """
    moved = dict.fromkeys(
        (cell.precision, _yardstick(cell.architecture)) for cell in cells if not cell.same
    )
    return [job for precision, model in moved for job in _splits(precision, model)]


def _yardstick(architecture: str) -> str:
    """Return the model whose losses set the tolerance. A wider model's sums have more terms, and
    bf16 moves the norm twice as much with shared key heads.
    """
    return architecture if architecture in (WIDE, SHARED, MIXTURE) else EVERYWHERE


def _splits(precision: str, model: str) -> list[Job]:
    """Return jobs with the same steps and checkpoint, but other orders of sums."""
    made = (precision, model, YARDSTICK)
    jobs = [Job(*made, YARDSTICK, micro) for micro in OTHER_SPLITS]
    if precision == "bf16":
        jobs += [Job(*made, Side("zero1_bf16_sums", 1), micro) for micro in (4, 2)]
    if model == MIXTURE:  # some of its 16-bit gradients are almost zero, which Adam amplifies
        undivided = (precision, model, Side("zero3", 2), Side("zero3", 1))
        jobs += [Job(*undivided, micro) for micro in (*OTHER_SPLITS, 2)]
    return jobs


def _limit(cell: Cell, out: Path) -> Apart:
    if cell.same:
        return Apart(0.0, 0.0)
    return _spread(cell.precision, _yardstick(cell.architecture), out)


@cache
def _spread(precision: str, model: str, out: Path) -> Apart:
    distances = [
        apart(_read(out, job), _read(out, Job(precision, model, job.source)))
        for job in _splits(precision, model)
    ]
    worst = Apart.worst([Apart(ROUNDING, ROUNDING), *distances])
    return Apart(TOLERANCE_FACTOR * worst.loss, TOLERANCE_FACTOR * worst.norm)


def _compared(cell: Cell, job: Job, out: Path) -> Row:
    source = _read(out, Job(cell.precision, cell.architecture, cell.source))
    target = _read(out, job)
    lost = [*source["differences"], *target["differences"]]
    if source["scales"] != target["scales"]:
        lost.append(f"loss scales {source['scales']}, then {target['scales']}")
    return Row(cell, lost, apart(target, source, across=not cell.same), _limit(cell, out))


def _self_test(out: Path) -> int:
    """Plant each defect in turn; return 0 if all were caught and there was no false alarm."""
    whole = list(dict.fromkeys(cell for _, cell in DEFECTS.values()))
    trials = [(cell, None) for cell in whole] + [(c, name) for name, (_, c) in DEFECTS.items()]
    _do([_load(cell, defect) for cell, defect in trials] + _yardsticks(whole), out)
    missed: list[str] = []
    for cell, defect in trials:
        row = _compared(cell, _load(cell, defect), out)
        print(f"planted: {defect or 'nothing'}\n  {row.line()}")
        missed += is_missed(row.failures, defect, cell)
    return self_test_result(missed, f"{len(DEFECTS)} defects planted")


def _read(out: Path, job: Job) -> dict[str, list[str]]:
    trip: dict[str, list[str]] = json.loads((out / job.result).read_text())
    return trip


def summary(rows: list[Row]) -> str:
    """Return a summary in one line."""
    equal = [row for row in rows if not row.lost]
    same = [row for row in rows if row.cell.same]
    bits = [row for row in same if row.apart == Apart(0.0, 0.0)]
    failed = [row for row in rows if row.failures]
    return (
        f"{len(rows)} cells: every tensor equal in {len(equal)}; losses bit-equal in {len(bits)} "
        f"of {len(same)} on the same layout; {len(failed)} differ"
    )


def _tolerances(rows: list[Row]) -> str:
    allowed = {
        row.cell.precision: f"{row.limit.loss:.0e} and {row.limit.norm:.0e}"
        for row in rows
        if not row.cell.same and _yardstick(row.cell.architecture) == EVERYWHERE
    }
    return f"between layouts losses and norms of the tied Llama may differ by {allowed}"


def _prepare(out: Path) -> None:
    """Prepare `out`; its kept results must be of these versions."""
    (out / "saved").mkdir(parents=True, exist_ok=True)
    same_versions(out, "checkpoints", "safetensors")
    for name, config in SAVED.items():
        (out / f"{name}.config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    sys.exit(main())
