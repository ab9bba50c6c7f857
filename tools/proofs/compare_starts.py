"""Switch, one by one, suspects that could decide at a start how long its steps take.

    python tools/proofs/compare_starts.py --rounds 3 --markdown docs/overhead_starts.md
    python tools/proofs/compare_starts.py --stage 1 --out FOLDER

The job is that of tools/proofs/benchmark_overhead.py. The harness and bare DeepSpeed are started
with each suspect switched, up to eight starts are alive together and train in turns. --out keeps
every group's measurements as a file, and goes on with those that are there. A round takes nine
minutes on two quiet cores, and needs 18 GiB of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from harness.estimate.fit import free_on_host
from harness.estimate.units import GIB
from tools.figure import write_plot
from tools.made_with import cpu_precision, machine, versions
from tools.proofs.overhead.job import LAYERS
from tools.proofs.overhead.kept import keep, kept
from tools.proofs.overhead.mapped import mapped_rows
from tools.proofs.overhead.placement import fit, placed_starts, placement_picture
from tools.proofs.overhead.prepare import Bench, prepare
from tools.proofs.overhead.scatter import scattered_memory
from tools.proofs.overhead.suspects import (
    PAGES_RETURNED,
    SUSPECTS,
    Sides,
    groups,
    suspect_rows,
)
from tools.proofs.overhead.turns import COUNTED, Length, Start, take_turns

MOST = 8  # ranks that are alive together: each has 1.4 GiB
NEEDED = 18 * GIB  # with what is scattered

_PAGE = """# The time of a step from start to start: suspects, switched one by one

Written by `python tools/proofs/compare_starts.py --stage {stage} --ranks {ranks} --rounds {rounds}
--markdown docs/overhead_starts.md`.

The job is that of [overhead.md](overhead.md) (ZeRO {stage}; ranks: {ranks}). Up to {most} starts
are alive together and train in {turns} turns of {steps} steps, so that all of them meet the same
machine; {rounds} rounds. As it comes, glibc returns to the kernel most of what a step frees, and
the kernel clears and maps these pages again in the next ("pages returned"): so the harness has
malloc keep them, and bare DeepSpeed is told to by its environment (MALLOC_MMAP_THRESHOLD_,
MALLOC_TRIM_THRESHOLD_). Each suspect is switched beside that, but for the last two. "Huge pages"
returns them, but maps 2 MiB at a time. A start with "scattered pages" finds every fourth page of a
6 GiB stretch free. Percentiles are those of single turns.

{table}

Density is the share that a start's own pages fill of the 2 MiB blocks of physical memory where they
lie. The first start after others have ended gets what those left free, here and there; one that
finds a stretch of free memory has all its pages together.

![Time over density](overhead_starts.svg)

{fitted}

Where the pages that are returned are mapped again: the line whose operator is the first to touch
them (backward: the line that calls it), in {counted} steps of the first round with pages returned.

{mapped}

{machine}, in {precision}; {versions}.
"""


def main() -> int:
    """Command line -> exit code."""
    args = _arguments()
    free = free_on_host()
    if free is not None and free < NEEDED:
        raise SystemExit(f"{NEEDED / GIB:g} GiB of memory are needed; free are {free / GIB:.1f}")
    with tempfile.TemporaryDirectory() as scratch:
        out: Path = args.out or Path(scratch)
        bench = prepare(Path(scratch) / "bench", args.layers)
        measured = [
            _measure(bench, args, out, number, place, starts)
            for number in range(args.rounds)
            for place, starts in enumerate(groups(MOST // args.ranks))
        ]
    table = "\n".join(suspect_rows(measured, args.turns))
    placed = list(placed_starts(measured, args.turns))
    fitted = fit(placed)
    mapped = "\n".join(
        mapped_rows(next(s[PAGES_RETURNED] for s in measured if PAGES_RETURNED in s))
    )
    print(table, fitted, mapped, sep="\n\n")
    if args.markdown:
        about = {
            name: getattr(args, name) for name in ("stage", "ranks", "rounds", "turns", "steps")
        }
        made = {"machine": machine(), "precision": cpu_precision(), "versions": versions()}
        tables = {"table": table, "fitted": fitted, "mapped": mapped}
        page = _PAGE.format(most=MOST, counted=COUNTED, **tables, **about, **made)
        args.markdown.write_text(page, encoding="utf-8")
        write_plot(args.markdown.with_suffix(".svg"), placement_picture(placed))
    return 0


def _measure(
    bench: Bench,
    args: argparse.Namespace,
    out: Path,
    number: int,
    place: int,
    starts: list[tuple[str, str]],
) -> Sides:
    """Return the measurements of a round's group: those in `out`, or made now and kept there."""
    length = f"{args.layers}-layers-{args.warm_up}-{args.turns}x{args.steps}-steps"
    path = out / f"zero{args.stage}-{args.ranks}-ranks-{length}-{number}-{place}.json"
    earlier: Sides = kept(path) or {}
    if [(name, side) for name in earlier for side in earlier[name]] == starts:
        return earlier
    first = number * 3 % len(starts)
    sides: Sides = {name: {} for name, _ in starts}
    with contextlib.ExitStack() as alive:
        waiting: dict[tuple[str, str], Start] = {}
        for name, side in [*starts[first:], *starts[:first]]:
            print(f"round {number + 1} of {args.rounds}: {name}, {side}", file=sys.stderr)
            suspect = SUSPECTS[name]
            with scattered_memory() if suspect.scattered else contextlib.nullcontext():
                waiting[name, side] = alive.enter_context(
                    bench.start(side, args.stage, args.ranks, Length.of(args), suspect)
                )
        take_turns(list(waiting.values()), Length.of(args))
        for name, side in starts:
            start = waiting[name, side]
            if name == PAGES_RETURNED:
                start.train(COUNTED, counted=True)
            sides[name][side] = start.finish()
    keep(path, sides)
    return sides


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=3)
    Length.add_arguments(parser)
    parser.set_defaults(turns=5, steps=3)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the rounds; resumes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
