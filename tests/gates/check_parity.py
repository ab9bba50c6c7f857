"""Check that layouts do not change training: every DeepSpeed layout against a plain PyTorch loop.

    python -m tests.gates.check_parity                       # a covering set of cells
    python -m tests.gates.check_parity --brief               # a few on two ranks, for every change
    python -m tests.gates.check_parity --full --out FOLDER   # every cell; resumes
    python -m tests.gates.check_parity --cells llama-zero3-bf16-4-2
    python -m tests.gates.check_parity --gpu --cells llama-zero3-bf16-4-1   # on GPUs
    python -m tests.gates.check_parity --self-test           # plants defects: all must show
    python -m tests.gates.check_parity --self-test --brief   # two of them
    python -m tests.gates.check_parity --self-test --defects "no clipping"

A cell is ARCHITECTURE-LAYOUT-PRECISION-ACCUMULATION-RANKS. The gate compares the initial loss
(nats), every parameter's gradient at step 0, the weights' change after one plain SGD step, loss and
gradient norm of 8 AdamW steps, and the held-out loss after them. The tolerance is 5 times the
spread of the plain loop against itself when only the order of its sums changes: over the fastest
order if the cell is within that, otherwise over more; with --full, over all. A mixture's curve in
half precision may be that of any order. Exit code 1 if a cell differs.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from harness.launch.fork_server import Zygote
from tests.gates.cell import Cell, Job
from tests.gates.cells import brief_cells, covering_cells, parity_cells
from tests.gates.compare import Row, compare
from tests.gates.defects import BRIEF, PARITY
from tests.gates.jobs import compute_alike, run_jobs
from tests.gates.matrix import Trial, chosen, matrix_arguments, refuse, results, self_test
from tests.gates.models import LEARNED, learned
from tools.made_with import versions

TOLERANCE_FACTOR = 5.0


def main(argv: list[str] | None = None, zygote: Zygote | None = None) -> int:
    """Run the command; return its exit code. Ranks are forked from `zygote`."""
    args = matrix_arguments(__doc__, "the trajectories", _add_arguments, argv)
    with results(args.out, "trajectories") as out:
        if args.self_test:
            return _self_test(out, args.brief, args.defects, zygote)
        covering = brief_cells() if args.brief else covering_cells()
        if args.gpu:
            compute_alike()  # the plain loop runs in this process
        cells = chosen(args, _all_cells(args.cells or ()), covering)
        rows = check(cells, out, args.full, {} if args.gpu else None, zygote)
    failed = [row for row in rows if row.failures]
    print(f"{versions()}: {len(rows)} cells, {len(failed)} differ from the plain loop")
    return 1 if failed else 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--brief", action="store_true", help="a part of the covering set")
    parser.add_argument("--defects", nargs="+", metavar="NAME", help="only these defects")
    parser.add_argument("--gpu", action="store_true", help="on this machine's GPUs")


def _all_cells(names: Iterable[str]) -> list[Cell]:
    """Return all cells, and those named that differ from them in accumulation and ranks alone."""
    cells = parity_cells()
    kinds = {cell.name.rsplit("-", 2)[0] for cell in cells}
    return [*cells, *(Cell.named(name) for name in names if name.rsplit("-", 2)[0] in kinds)]


def check(
    cells: list[Cell],
    out: Path,
    whole: bool,
    env: Mapping[str, str | None] | None = None,
    zygote: Zygote | None = None,
) -> list[Row]:
    """Train the cells missing in `out`, compare everything, print a line per cell.

    `whole`: use the whole spread for each. `env`: environment of ranks on GPUs, on which the plain
    loop then also runs.
    """
    train([Job(cell) for cell in cells], out, env, zygote)
    rows = []
    for cell in cells:
        rows.append(_compared(cell, out, whole, _device(env)))
        print(rows[-1].line(), flush=True)
    return rows


def _device(env: Mapping[str, str | None] | None) -> str:
    return "cpu" if env is None else "cuda"


def _compared(cell: Cell, folder: Path, whole: bool = False, device: str = "cpu") -> Row:
    torch.set_num_threads(1)  # matrices are tiny: more threads would only wait for each other
    return compare(cell, folder, TOLERANCE_FACTOR, whole, device)


def _self_test(out: Path, brief: bool, names: list[str] | None, zygote: Zygote | None) -> int:
    """Plant defects: only `names`; if `brief`, BRIEF, each only in its first cell."""
    if unknown := [name for name in names or () if name not in PARITY]:
        refuse(f"--defects: no such defect: {', '.join(unknown)}; there are {', '.join(PARITY)}")
    defects = {
        name: PARITY[name].cells[: 1 if brief else None]
        for name in names or (BRIEF if brief else PARITY)
    }

    def compared(trials: list[Trial]) -> Iterator[Row]:
        train([Job(*trial) for trial in trials], out, zygote=zygote)
        return (_compared(trial.cell, out / trial.folder) for trial in trials)

    return self_test(defects, compared)


def train(
    jobs: list[Job],
    out: Path,
    env: Mapping[str, str | None] | None = None,
    zygote: Zygote | None = None,
) -> None:
    """Train the jobs missing in `out`, each into its own folder there."""
    for name in LEARNED:
        config = learned(name, _device(env))
        (out / f"{name}.config.json").write_text(json.dumps(config))
    run_jobs(jobs, out, env, zygote)


if __name__ == "__main__":
    sys.exit(main())
