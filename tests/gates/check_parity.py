"""Does the layout change what is learned? Every DeepSpeed layout against a plain PyTorch loop.

    python -m tests.gates.check_parity                       # a covering set of cells
    python -m tests.gates.check_parity --brief               # a few on two ranks: of every change
    python -m tests.gates.check_parity --full --out FOLDER   # every cell; resumes
    python -m tests.gates.check_parity --cells llama-zero3-bf16-4-2
    python -m tests.gates.check_parity --self-test           # plants defects: all must show
    python -m tests.gates.check_parity --self-test --brief   # three of them
    python -m tests.gates.check_parity --self-test --defects "no clipping"

A cell is ARCHITECTURE-LAYOUT-PRECISION-ACCUMULATION-RANKS. Compared are the initial loss (nats),
every parameter's gradient at step 0, the weights' change after one plain SGD step, loss and
gradient norm of 20 AdamW steps, and the held-out loss after them. A cell's tolerance is 5 times the
spread of the plain loop against itself when only the order of its sums changes: over the quickest
of the orders where it is within that, over further ones where it is not; with --full, over all.
With --cells or --defects, the page that --markdown names keeps its other lines.
Exit code 1 when a cell differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from harness.launch.fork_server import Zygote
from tests.gates.jobs import Group, run_jobs
from tests.gates.matrix import (
    chosen,
    is_missed,
    matrix_arguments,
    refuse,
    same_versions,
    self_test_result,
)
from tests.gates.models import LEARNED, learned
from tests.gates.parity.cells import Cell, Job, all_cells
from tests.gates.parity.covering import brief_cells, covering_cells
from tests.gates.parity.report import Row, markdown, self_test_markdown, terminal_line

TOLERANCE_FACTOR = 5.0


def main(argv: list[str] | None = None, zygote: Zygote | None = None) -> int:
    """Command line -> exit code. `zygote`: the process that ranks are forked from, else its own."""
    args = matrix_arguments(__doc__, "the trajectories", "table", True, True, argv)
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        same_versions(out, "trajectories")
        if args.self_test:
            return _self_test(out, args.markdown, args.brief, args.defects, zygote)
        covering = brief_cells() if args.brief else covering_cells()
        whole = args.full or bool(args.markdown)  # as a table shows it
        rows = check(chosen(args, all_cells(), covering), out, whole, zygote=zygote)
        if args.markdown:
            args.markdown.parent.mkdir(parents=True, exist_ok=True)
            earlier = _earlier(args.markdown) if args.cells else ""
            _write(args.markdown, lambda: markdown(rows, all_cells(), earlier))
    failed = [row for row in rows if row.failures]
    print(f"{len(rows)} cells, {len(failed)} differ from the plain loop")
    return 1 if failed else 0


def check(
    cells: list[Cell],
    out: Path,
    whole: bool,
    env: Mapping[str, str | None] | None = None,
    zygote: Zygote | None = None,
) -> list[Row]:
    """Train what `out` does not hold yet, compare everything, print a line per cell.

    `whole`: each by the whole spread. `env`: of ranks on GPUs, where the plain loop then is, too.
    """
    train([Job(cell) for cell in cells], out, env, zygote)
    return _compared(cells, out, whole, _device(env))


def _device(env: Mapping[str, str | None] | None) -> str:
    return "cpu" if env is None else "cuda"


def _compared(
    cells: Iterable[Cell], out: Path, whole: bool = False, device: str = "cpu"
) -> list[Row]:
    import torch

    from tests.gates.parity.compare import compare

    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    rows = []
    for cell in cells:
        rows.append(compare(cell, out, TOLERANCE_FACTOR, whole, device))
        print(terminal_line(rows[-1]), flush=True)
    return rows


def _self_test(
    out: Path, page: Path | None, brief: bool, names: list[str] | None, zygote: Zygote | None
) -> int:
    """Plant each defect in turn; returns 0 when every one was caught, and nothing without one.

    `brief`: each in its first cell alone. `names`: only these; None: all (of `brief`: BRIEF).
    """
    from tests.gates.parity.defects.table import BRIEF, DEFECTS

    if unknown := [name for name in names or () if name not in DEFECTS]:
        refuse(f"--defects: no such defect: {', '.join(unknown)}; there are {', '.join(DEFECTS)}")
    every: dict[str | None, tuple[Cell, ...]] = {name: d.cells for name, d in DEFECTS.items()}
    planted = names or (BRIEF if brief else DEFECTS)
    trials: dict[str | None, tuple[Cell, ...]] = {
        name: every[name][:1] if brief else every[name] for name in planted
    }
    trials, every = _with_undamaged(trials), _with_undamaged(every)
    undamaged = trials[None]
    folders = {defect: f"defect-{number}" for number, defect in enumerate(trials)}
    jobs = [Job(cell, defect, folders[defect]) for defect in trials for cell in trials[defect]]
    train(jobs, out, zygote=zygote)
    missed: list[str] = []
    rows: dict[str | None, list[Row]] = {}
    for defect, cells in trials.items():
        print(f"planted: {defect or 'nothing'}")
        rows[defect] = _compared(cells, out / folders[defect])
        for row in rows[defect]:
            missed += is_missed(row.failures, defect, row.cell)
    if page:
        earlier = _earlier(page) if names else ""
        _write(page, lambda: self_test_markdown(rows, every, earlier))
    summary = f"{len(trials) - 1} defects planted in {len(jobs) - len(undamaged)} cells"
    return self_test_result(missed, summary)


def _with_undamaged(
    trials: dict[str | None, tuple[Cell, ...]],
) -> dict[str | None, tuple[Cell, ...]]:
    """Return them after a trial of all their cells without a defect."""
    return {
        None: tuple(dict.fromkeys(cell for cells in trials.values() for cell in cells)),
        **trials,
    }


def _earlier(page: Path) -> str:
    return page.read_text() if page.exists() else ""


def _write(page: Path, text: Callable[[], str]) -> None:
    try:
        page.write_text(text())
    except ValueError as error:
        refuse(f"--markdown: {page}: {error}")


def train(
    jobs: list[Job],
    out: Path,
    env: Mapping[str, str | None] | None = None,
    zygote: Zygote | None = None,
) -> None:
    """Train what `out` does not hold yet, each job into its own folder there."""
    for name in LEARNED:
        config = learned(name, _device(env))
        (out / f"{name}.config.json").write_text(json.dumps(config))
    missing = [job for job in jobs if not (out / job.folder / f"{job.cell.name}.json").exists()]
    run_jobs("parity", missing, out, lambda job: Group(0, job.cell.ranks), env, zygote)


if __name__ == "__main__":
    sys.exit(main())
