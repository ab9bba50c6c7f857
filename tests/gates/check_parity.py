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
Exit code 1 when a cell differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

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
from tests.gates.parity.cells import Cell, Job, all_cells, brief_cells, covering_cells
from tests.gates.parity.compare import Row, compare
from tests.gates.parity.defects import BRIEF, DEFECTS
from tools.made_with import versions

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
        args.markdown.write_text(_HEADING.format(versions()) + "".join(map(_table_line, rows)))
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
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    rows = []
    for cell in cells:
        rows.append(compare(cell, out, TOLERANCE_FACTOR, whole, device))
        print(rows[-1].line(), flush=True)
    return rows


def _self_test(
    out: Path, page: Path | None, brief: bool, names: list[str] | None, zygote: Zygote | None
) -> int:
    """Plant each defect in turn; returns 0 when every one was caught, and nothing without one.

    `brief`: each in its first cell alone. `names`: only these; None: all (of `brief`: BRIEF).
    """
    if unknown := [name for name in names or () if name not in DEFECTS]:
        refuse(f"--defects: no such defect: {', '.join(unknown)}; there are {', '.join(DEFECTS)}")
    trials: dict[str | None, tuple[Cell, ...]] = {
        name: DEFECTS[name].cells[: 1 if brief else None]
        for name in names or (BRIEF if brief else DEFECTS)
    }
    cells = tuple(dict.fromkeys(cell for cells in trials.values() for cell in cells))
    trials = {None: cells, **trials}  # without a defect nothing may show
    folders = {defect: f"defect-{number}" for number, defect in enumerate(trials)}
    jobs = [Job(cell, defect, folders[defect]) for defect in trials for cell in trials[defect]]
    train(jobs, out, zygote=zygote)
    missed, lines = [], []
    for defect, cells in trials.items():
        print(f"planted: {defect or 'nothing'}")
        for row in _compared(cells, out / folders[defect]):
            missed += is_missed(row.failures, defect, row.cell)
            exceeded = ", ".join(f"{name} {row.pairs()[name]}" for name in row.failures)
            verdict = "caught" if row.failures else "equal" if defect is None else "MISSED"
            lines.append(f"| {defect or 'none'} | {row.cell.name} | {exceeded} | {verdict} |")
    if page:
        page.write_text(_SELF_TEST_HEADING.format(versions()) + "\n".join(lines) + "\n")
    summary = f"{len(trials) - 1} defects planted in {len(jobs) - len(trials[None])} cells"
    return self_test_result(missed, summary)


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


_HEADING = """\
# Every layout against a plain PyTorch loop

Generated by `make tables`: each quantity as measured / allowed. Losses are in nats, the
rest is relative. {}, one to eight CPU ranks over gloo.

In pipelined layouts the accumulated micro-batches are those that fill the stages. Gemma
2 and OLMo 2 are not there in fp16: in the plain loop transformers' own models give
NaN.

| model | layout | precision | accum | ranks | initial loss | gradient | SGD change \
| loss, 20 steps | norm, 20 steps | held-out loss | verdict |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""

_SELF_TEST_HEADING = """\
# Defects planted into the parity gate

Generated by `make tables`: each planted around the real engine, alone, in the cells in
which it can show; by how much each quantity exceeded what is allowed. Without a defect
none may. {}.

| defect | cell | exceeded, measured / allowed | verdict |
|---|---|---|---|
"""


def _table_line(row: Row) -> str:
    values = [*map(str, vars(row.cell).values()), *row.pairs().values(), row.verdict]
    return f"| {' | '.join(values)} |\n"


if __name__ == "__main__":
    sys.exit(main())
