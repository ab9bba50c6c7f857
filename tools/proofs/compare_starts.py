"""Switch, one by one, suspects that could decide at a start how long its steps take.

    python tools/proofs/compare_starts.py --stage 3 --ranks 1 --rounds 8
    python tools/proofs/compare_starts.py --stage 3 --ranks 1 --out FOLDER --markdown PAGE

The job is that of tools/proofs/benchmark_overhead.py. In a round the harness is started once as
usual and once with each suspect switched, and bare DeepSpeed with those that it has, too; in turns
as the first. --out keeps every round as a file, and goes on with those that are there. A round
takes four minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.made_with import machine, versions
from tools.proofs.overhead.job import LAYERS
from tools.proofs.overhead.prepare import Bench, add_length, prepare
from tools.proofs.overhead.suspects import NOTHING, SUSPECTS, Sides, suspect_rows

_PAGE = """# The time of a step from start to start: suspects, switched one by one

Written by `python tools/proofs/compare_starts.py --stage {stage} --ranks {ranks} --rounds {rounds}
--markdown PAGE`.

Each suspect is switched alone, in {rounds} rounds of starts (ZeRO {stage}; ranks: {ranks}); the job
is that of [overhead.md](overhead.md). A start's time is the median of its timed steps. "Freed pages
kept" sets MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, so that glibc keeps what a step frees
for the next one, and the kernel maps no page again; "huge pages" lets it map 2 MiB at a time.

{table}

{machine}; {versions}.
"""


def main() -> int:
    """Command line -> exit code."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        out: Path = args.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        bench = prepare(Path(scratch) / "bench", args.layers, args.warm_up, args.steps)
        rounds = [_round(bench, args, out, number) for number in range(args.rounds)]
    table = "\n".join(suspect_rows(rounds))
    print(table)
    if args.markdown:
        about = {"stage": args.stage, "ranks": args.ranks, "rounds": args.rounds, "table": table}
        made = {"machine": machine(), "versions": versions()}
        args.markdown.write_text(_PAGE.format(**about, **made), encoding="utf-8")
    return 0


def _round(bench: Bench, args: argparse.Namespace, out: Path, number: int) -> Sides:
    """Return one round's measurements: those in `out`, or measured now and written there."""
    lengths = f"{args.layers}-layers-{args.warm_up}-{args.steps}-steps"
    path = out / f"zero{args.stage}-{args.ranks}-ranks-{lengths}-{number}.json"
    if path.exists():
        sides: Sides = json.loads(path.read_text())
        return sides
    starts = [
        (name, side)
        for name, suspect in SUSPECTS.items()
        for side in ("harness", "bare")
        if side == "harness" or suspect.is_of_both or name == NOTHING
    ]
    first = number * 5 % len(starts)
    sides = {name: {} for name in SUSPECTS}
    for name, side in [*starts[first:], *starts[:first]]:
        print(f"round {number + 1} of {args.rounds}: {name}, {side}", file=sys.stderr, flush=True)
        measured = bench.measure(side, args.stage, args.ranks, 0, SUSPECTS[name])
        sides[name][side] = measured
    path.write_text(json.dumps(sides))
    return sides


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=8)
    add_length(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the rounds; resumes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
