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

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.gates.cell import Job, Side, Trip
from tests.gates.cells import covering_trips, trips
from tests.gates.defects import CHECKPOINTS
from tests.gates.jobs import run_jobs
from tests.gates.matrix import Trial, chosen, matrix_arguments, results, self_test
from tests.gates.models import EVERYWHERE, MIXTURE, SAVED, SHARED, WIDE
from tests.gates.trajectory import Apart, Trajectory, apart
from tools.made_with import versions

TOLERANCE_FACTOR = 5.0
ROUNDING = 2.0**-23  # fp32's last place; two correct sums may differ by it
YARDSTICK = "zero1x1"
OTHER_SPLITS = (8, 1)  # samples per micro-batch; the yardstick has 4


@dataclass(frozen=True)
class Row:
    """The verdict on one cell."""

    cell: Trip
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
    with results(args.out, "checkpoints", "safetensors") as out:
        for name, config in SAVED.items():
            (out / f"{name}.config.json").write_text(json.dumps(config))
        if args.self_test:
            return self_test(
                {name: defect.cells for name, defect in CHECKPOINTS.items()},
                lambda trials: compared(trials, out),
            )
        cells = chosen(args, trips(), covering_trips())
        rows = []
        for row in compared([Trial(cell, None, ".") for cell in cells], out):
            rows.append(row)
            print(row.line(), flush=True)
    print(summary(rows))
    print(versions())
    return 1 if any(row.failures for row in rows) else 0


def compared(trials: list[Trial], out: Path) -> Iterator[Row]:
    """Run the jobs missing in `out`; yield the verdict on each trial."""
    loads = [_load(*trial) for trial in trials]
    # The effect of the order of sums, for cells that change their layout.
    moved = dict.fromkeys(
        (trial.cell.precision, _yardstick(trial.cell.architecture))
        for trial in trials
        if not trial.cell.same
    )
    loads += [job for precision, model in moved for job in _splits(precision, model)]
    run_jobs([*(_save(job.source) for job in loads if job.source), *loads], out)
    return (_compared(trial, out) for trial in trials)


def _save(side: Side) -> Job:
    return Job(side, verb="save")


def _load(cell: Trip, defect: str | None = None, folder: str = ".", micro_batch: int = 0) -> Job:
    return Job(cell.target, defect, folder, "resume", cell.source, micro_batch)


def _yardstick(architecture: str) -> str:
    """Return the model whose losses set the tolerance. A wider model's sums have more terms, and
    bf16 moves the norm twice as much with shared key heads.
    """
    return architecture if architecture in (WIDE, SHARED, MIXTURE) else EVERYWHERE


def _splits(precision: str, model: str) -> list[Job]:
    """Return jobs with the same steps and checkpoint, but other orders of sums."""
    ways = [(YARDSTICK, YARDSTICK, micro) for micro in OTHER_SPLITS]
    if precision == "bf16":
        ways += [(YARDSTICK, "zero1_bf16_sumsx1", micro) for micro in (4, 2)]
    if model == MIXTURE:  # some of its 16-bit gradients are almost zero, which Adam amplifies
        ways += [("zero3x2", "zero3x1", micro) for micro in (*OTHER_SPLITS, 2)]
    return [_load(Trip.of(precision, model, *sides), micro_batch=micro) for *sides, micro in ways]


@cache
def _spread(precision: str, model: str, out: Path) -> Apart:
    distances = [
        apart(_read(out, job), _read(out, _save(job.source)))
        for job in _splits(precision, model)
        if job.source
    ]
    return Apart.largest([Apart(ROUNDING, ROUNDING), *distances]).scaled(TOLERANCE_FACTOR)


def _compared(trial: Trial, out: Path) -> Row:
    cell: Trip = trial.cell
    source, target = _read(out, _save(cell.source)), _read(out, _load(*trial))
    lost = [*source.differences, *target.differences]
    if source.scales != target.scales:
        lost.append(f"loss scales {source.scales}, then {target.scales}")
    limit = Apart(0.0, 0.0)
    if not cell.same:
        limit = _spread(cell.precision, _yardstick(cell.architecture), out)
    return Row(cell, lost, apart(target, source, across=not cell.same), limit)


def _read(out: Path, job: Job) -> Trajectory:
    return Trajectory.load(out / job.result)


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


if __name__ == "__main__":
    sys.exit(main())
