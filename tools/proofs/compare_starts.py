"""Switch, one by one, suspects that could decide at a start how long its steps take.

    python tools/proofs/compare_starts.py --rounds 3 --markdown docs/overhead_starts.md
    python tools/proofs/compare_starts.py --stage 1 --out FOLDER

The job is that of tools/proofs/benchmark_overhead.py. The harness and bare DeepSpeed are started
with each suspect switched, up to eight starts are alive together and train in turns. --out keeps
every group's measurements as a file, and goes on with those that are there. A round takes nine
minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.figure import write_plot
from tools.made_with import machine, versions
from tools.proofs.overhead.job import LAYERS
from tools.proofs.overhead.prepare import Bench, prepare
from tools.proofs.overhead.scatter import scattered_memory
from tools.proofs.overhead.suspects import (
    SUSPECTS,
    Sides,
    density_picture,
    density_points,
    groups,
    suspect_rows,
)
from tools.proofs.overhead.turns import Length, Start, take_turns

MOST = 8  # starts that are alive together: each has 1.4 GiB

_PAGE = """# The time of a step from start to start: suspects, switched one by one

Written by `python tools/proofs/compare_starts.py --stage {stage} --ranks {ranks} --rounds {rounds}
--markdown docs/overhead_starts.md`.

The job is that of [overhead.md](overhead.md) (ZeRO {stage}; ranks: {ranks}). Up to {most} starts
are alive together and train in {turns} turns of {steps} steps, so that all of them meet the same
machine; {rounds} rounds. glibc returns what a step frees to the kernel, which maps these pages
again in the next step: how many, differs from start to start on both sides. So all starts but the
last two keep freed pages (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_), and each suspect is
switched beside that. "Huge pages" maps 2 MiB at a time. "Scattered pages" gives a start memory of
which every fourth page is free.

{table}

Density is the share that a start's own pages fill of the 2 MiB blocks of physical memory where they
lie. The first start after others have ended gets what those left free, here and there; one that
finds a stretch of free memory has all its pages together.

![Time over density](overhead_starts.svg)

{found}

{machine}; {versions}.
"""


def main() -> int:
    """Command line -> exit code."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        out: Path = args.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        bench = prepare(Path(scratch) / "bench", args.layers, Length.of(args))
        measured = [
            _measure(bench, args, out, number, place, starts)
            for number in range(args.rounds)
            for place, starts in enumerate(groups(MOST))
        ]
    table = "\n".join(suspect_rows(measured, args.turns))
    points = density_points(measured, args.turns)
    found = _found(points)
    print(table, found, sep="\n\n")
    if args.markdown:
        about = {
            name: getattr(args, name) for name in ("stage", "ranks", "rounds", "turns", "steps")
        }
        made = {"machine": machine(), "versions": versions()}
        page = _PAGE.format(most=MOST, table=table, found=found, **about, **made)
        args.markdown.write_text(page, encoding="utf-8")
        write_plot(args.markdown.with_suffix(".svg"), density_picture(points))
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
    if path.exists():
        sides: Sides = json.loads(path.read_text())
        return sides
    first = number * 3 % len(starts)
    sides = {name: {} for name, _ in starts}
    with contextlib.ExitStack() as alive:
        waiting: dict[tuple[str, str], Start] = {}
        for name, side in [*starts[first:], *starts[:first]]:
            print(f"round {number + 1} of {args.rounds}: {name}, {side}", file=sys.stderr)
            suspect = SUSPECTS[name]
            with scattered_memory() if suspect.scattered else contextlib.nullcontext():
                starting = bench.start(side, args.stage, args.ranks, suspect)
                waiting[name, side] = alive.enter_context(starting)
        take_turns(list(waiting.values()), bench.length)
        for (name, side), start in waiting.items():
            sides[name][side] = start.finish()
    path.write_text(json.dumps(sides))
    return sides


def _found(points: list[tuple[str, bool, float, float]]) -> str:
    """Return a sentence: how far time follows density."""
    known = [(density, time) for _, _, density, time in points if not math.isnan(density)]
    if len(known) < 3:
        return "Densities are not known: the kernel tells them to root alone."
    (slope, _), r = statistics.linear_regression(*zip(*known, strict=True)), _correlation(known)
    return (
        f"Of {len(known)} starts that do the same, time and density are correlated by {r:.2f}: at "
        f"a tenth less density a step takes {-slope / 10:.2%} longer."
    )


def _correlation(pairs: list[tuple[float, float]]) -> float:
    return statistics.correlation(*zip(*pairs, strict=True))


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
