"""Compare the estimate with the live bytes of real CPU runs.

    python -m tests.gates.measure_memory                       # a covering set of cases
    python -m tests.gates.measure_memory --full --out FOLDER   # every case; resumes
    python -m tests.gates.measure_memory --cases zero3-bf16-4
    python -m tests.gates.measure_memory --gpu --out FOLDER    # peaks of 26 runs on a GPU

A case is LAYOUT-PRECISION-ACCUMULATION. Its bytes are counted when the engine is built, when the
gradients of the third step are ready, and after that step. If tensors or sequences are divided
over the ranks or activations are recomputed, the bytes saved for the backward pass are also
counted. Exit code 1 if a count is off by 1 %. The peaks during accumulation and the optimizer step
are shown, too; they are less exact: the model is so small that one tensor is 4 %, gloo copies what
NCCL gathers in place, and gradient buffers linger until Python's cycle collector comes by.

With --gpu, the peaks of whole runs are compared, each in its own processes. Exit code 1 if the
median error is above 1 %, the worst above 3 %, or a run judged to fit runs out of memory.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.estimate.activations import saved_for_backward
from harness.estimate.timeline import rank_timeline
from harness.layout.world import World
from harness.plan.memory import memory_inputs
from harness.terminal import HelpFormatter
from tests.gates.cell import Case, Job
from tests.gates.cells import covering_cases, memory_cases
from tests.gates.gpu_memory import GPU_CASES, measure_gpu, no_gpu, verdict_of
from tests.gates.jobs import run_jobs
from tests.gates.matrix import chosen, results
from tests.gates.models import MEASURED
from tools.made_with import versions

TOLERANCE = 0.01
POINTS = ("built", "gradients_ready", "between_steps")
SAVED = "saved"  # for the backward pass, if tokens are divided or recomputed
# One activity of the engine -> the phases that it passes through.
PEAKS = {
    "accumulate": ("forward", "loss", "backward_first", "backward_last", "reduce"),
    "apply": ("norm", "cast", "step"),
}


@dataclass(frozen=True)
class Row:
    """The bytes of one case, rank and point."""

    case: Case
    optimizer: str
    rank: int
    point: str
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        """Relative error; above 0 if too much was predicted."""
        return self.predicted / self.measured - 1

    def line(self) -> str:
        """Return a line with the measured and predicted bytes and the error."""
        return (
            f"{self.case.name:32} {self.optimizer:22} rank {self.rank} {self.point:16} "
            f"{self.measured:>11,} measured {self.predicted:>11,} predicted {self.error:+.3%}"
        )


def predicted_bytes(case: Case, rank: int, configs: Path) -> dict[str, int]:
    """Return a rank's estimated bytes at each point, and its peaks; a CPU has one memory."""
    world = World(rank, case.ranks, rank, case.ranks, launcher="torch")
    inputs = memory_inputs(case.plan(world, configs, {"name": case.optimizer}))
    assert inputs is not None, "the model's family is known"
    timeline = rank_timeline(inputs, rank)

    def bytes_in(phase: str) -> int:
        return sum(
            size
            for place in ("device", "host")
            for component, size in timeline.phase(phase, place).items()
            if component != "process"
        )

    points = {point: bytes_in(point) for point in POINTS}
    points[SAVED] = saved_for_backward(inputs.of_stage(0))
    return points | {name: max(map(bytes_in, phases)) for name, phases in PEAKS.items()}


def compare(case: Case, folder: Path) -> list[Row]:
    """Return the rows of a case that was measured into `folder`."""
    rows = []
    by_rank = json.loads((folder / f"{_job(case).result}.json").read_text())
    for rank, held in enumerate(by_rank):
        predicted = predicted_bytes(case, rank, folder)
        for point in (*POINTS, *PEAKS, SAVED):
            exact = held["points"].get(point)
            if point == SAVED and exact is None:
                continue
            measured = exact["bytes"] if exact else held["peaks"][point]
            rows.append(Row(case, held["optimizer"], rank, point, measured, predicted[point]))
    return rows


def main() -> int:
    """Run the command; return its exit code."""
    args = _arguments()
    if args.gpu:
        return _on_gpu(args)
    cases = chosen(args, memory_cases(), covering_cases())
    with results(args.out, "measurements") as out:
        rows = measure(cases, out)
    print(*(row.line() for row in rows), sep="\n")
    errors = [abs(row.error) for row in rows if row.point not in PEAKS]
    off = [error for error in errors if error > TOLERANCE]
    print(f"{versions()}; the worst is {max(errors):.3%} off")
    print(f"{len(errors)} counts, {len(off)} off by more than {TOLERANCE:.0%}")
    return 1 if off else 0


def _on_gpu(args: argparse.Namespace) -> int:
    if why := no_gpu():
        print(why, file=sys.stderr)
        return 2
    cases, rows = chosen(args, GPU_CASES, GPU_CASES), []
    with results(args.out, "measurements") as out:
        for row in measure_gpu(cases, out, args.ranks):
            rows.append(row)
            print(f"{len(rows)}/{len(cases)} {json.dumps(row)}", flush=True)
    text, as_aimed = verdict_of(rows)
    print(text)
    return 0 if as_aimed else 1


def measure(cases: list[Case], out: Path) -> list[Row]:
    """Run the cases missing in `out` on CPU ranks, and compare everything."""
    for name, config in MEASURED.items():
        (out / f"{name}.config.json").write_text(json.dumps(config))
    run_jobs([_job(case) for case in cases], out)
    return [row for case in cases for row in compare(case, out)]


def _job(case: Case) -> Job:
    return Job(case, verb="hold")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--full", action="store_true", help="every case")
    parser.add_argument("--cases", dest="cells", nargs="+", metavar="CASE")
    parser.add_argument("--gpu", action="store_true", help="on this machine's GPUs")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, with --gpu (default: 1)")
    parser.add_argument("--out", type=Path, help="keep the measurements here, and resume")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
