"""Count the processor's instructions in a step of the harness and of bare DeepSpeed.

    apt-get install valgrind
    python tools/proofs/count_instructions.py --markdown docs/overhead_instructions.md

The job is that of tools/proofs/benchmark_overhead.py. Times of a step differ from start to start,
with the machine; these counts do not: they say what each side does, and in which library. --out
keeps each cell as a file, and goes on with those that are there. Half an hour on two cores, which
need not be quiet.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.made_with import cpu_precision, machine, versions
from tools.proofs.overhead.instructions import STEPS, Place, instructions_of
from tools.proofs.overhead.job import LAYERS
from tools.proofs.overhead.kept import keep, kept
from tools.proofs.overhead.prepare import Bench, prepare
from tools.proofs.overhead.spread import COMPARED, NAMES, name_of

MOST = 8  # libraries that have a row of their own

_PAGE = """# What the harness executes in a step

Written by `python tools/proofs/count_instructions.py --markdown docs/overhead_instructions.md`.

The time of a step [differs from start to start](overhead.md), of whichever side, and with whatever
else the machine does. What each side executes does not: here are the instructions of a step,
counted by valgrind's callgrind, all ranks together, means over {steps} steps after the fourth
(after its third the harness compares the memory it holds with the estimate, once). The job is that
of [overhead.md](overhead.md). Vectors have 128 bits on both sides, since valgrind is slow at wider
ones: a step takes more instructions than it usually would, so look at counts before the ratio.
"Training" is the first thread of a process. The others are the thread of batches, the watchdog and
gloo's; what wakes by the clock is counted too often, since a step lasts most of a minute here.
`libtorch_cpu` has the operators, `libpython` the interpreter.

{table}

{machine}, in {precision}; {versions}.
"""


def main() -> int:
    """Command line -> exit code."""
    args = _arguments()
    if missing := [name for name in ("valgrind", "callgrind_control") if not shutil.which(name)]:
        raise SystemExit(f"not installed: {', '.join(missing)} (apt-get install valgrind)")
    cells = [
        {"stage": stage, "ranks": ranks, "layers": args.layers}
        for stage, ranks in product(args.stages, args.ranks)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        out: Path = args.out or Path(scratch) / "cells"
        bench = prepare(Path(scratch) / "bench", args.layers)
        measured = [_measure(bench, cell, out) for cell in cells]
    table = "\n".join(rows(cells, measured))
    print(table)
    if args.markdown:
        page = _PAGE.format(
            steps=STEPS,
            table=table,
            machine=machine(),
            precision=cpu_precision(),
            versions=versions(),
        )
        args.markdown.write_text(page, encoding="utf-8")
    return 0


def _measure(bench: Bench, cell: dict[str, Any], out: Path) -> dict[str, Counter[Place]]:
    """Return each side's instructions in a cell: those in `out`, or counted now and kept there."""
    path = out / f"{name_of(cell).replace(', ', '-').replace(' ', '-')}.json"
    if earlier := kept(path):
        return {
            side: Counter({Place(library, main): count for library, main, count in places})
            for side, places in earlier.items()
        }
    print(name_of(cell), file=sys.stderr, flush=True)
    with ThreadPoolExecutor() as pool:  # both at once: counts are not disturbed by that
        counts = {
            side: pool.submit(instructions_of, bench, side, cell["stage"], cell["ranks"])
            for side in COMPARED
        }
        done = {side: future.result() for side, future in counts.items()}
    keep(
        path,
        {side: [[*place, n] for place, n in places.items()] for side, places in done.items()},
    )
    return done


def rows(cells: list[dict[str, Any]], measured: list[dict[str, Counter[Place]]]) -> Iterator[str]:
    """Yield the lines of a table: millions of instructions in a step, a column for each cell."""
    yield f"| million instructions a step | {' | '.join(map(name_of, cells))} |"
    yield f"|---|{'---:|' * len(cells)}"
    for side in COMPARED:
        yield _row(NAMES[side], (f"{_millions(sides[side]):,.1f}" for sides in measured))
    ours, theirs = COMPARED
    ratios = (_millions(sides[ours]) / _millions(sides[theirs]) for sides in measured)
    yield _row(f"{NAMES[ours]} / {NAMES[theirs]}", (f"**{ratio:.4f}**" for ratio in ratios))
    more = [
        Counter({p: sides[ours][p] - sides[theirs][p] for p in {*sides[ours], *sides[theirs]}})
        for sides in measured
    ]
    yield _row("more in the harness", (f"{_millions(each):+.1f}" for each in more))
    for is_main, title in ((True, "of it, training"), (False, "of it, other threads")):
        of_threads = (Counter({p: n for p, n in e.items() if p.is_main is is_main}) for e in more)
        yield _row(title, (f"{_millions(each):+.1f}" for each in of_threads))
    largest: Counter[str] = Counter()
    for each in more:
        for library, count in _by_library(each).items():
            largest[library] = max(largest[library], abs(count))
    for library, _ in largest.most_common(MOST):
        values = (_by_library(each)[library] / STEPS / 1e6 for each in more)
        yield _row(f"of it, `{library}`", (f"{value:+.2f}" for value in values))


def _row(title: str, values: Iterator[str]) -> str:
    return f"| {title} | {' | '.join(values)} |"


def _millions(counts: Counter[Place]) -> float:
    return counts.total() / STEPS / 1e6


def _by_library(counts: Counter[Place]) -> Counter[str]:
    summed: Counter[str] = Counter()
    for place, count in counts.items():
        summed[place.library.split(".cpython-")[0]] += count
    return summed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3], metavar="STAGE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="RANKS")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the cells; resumes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
