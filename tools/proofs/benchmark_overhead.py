"""Time the harness against a bare DeepSpeed loop and the Hugging Face Trainer.

    python tools/proofs/benchmark_overhead.py
    python tools/proofs/benchmark_overhead.py --stages 3 --ranks 1 --rounds 9

25 million parameters on CPU ranks, the same weights, batches and resolved JSON for all three: the
harness with its run folder and a line of metrics in every step; a loop that does nothing but train;
the Trainer with its log in every step. In every round each of them is started anew, in turns as the
first: start-up, then steps. Further, how often the host would wait for a device, and how fast data
comes without a model. About ten minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(REPOSITORY)

from harness.run.record import git_commit
from tools.made_with import machine, versions
from tools.proofs.overhead.data_path import data_rates
from tools.proofs.overhead.prepare import Bench, prepare
from tools.proofs.overhead.report import COUNTED, SIDES, markdown, tables

PROC_STAT = Path("/proc/stat")


def main() -> int:
    """Command line -> exit code."""
    args = _arguments()
    began, busy = time.monotonic(), _busy_elsewhere_s()
    with tempfile.TemporaryDirectory() as temporary:
        bench = prepare(Path(temporary), args.warm_up, args.steps)
        cells = [
            {"stage": stage, "ranks": ranks, "rounds": list(_rounds(bench, stage, ranks, args))}
            for stage in args.stages
            for ranks in args.ranks
        ]
        _say("the data path")
        data = list(data_rates(bench.data, args.data_rounds))
    results = {
        "cells": cells,
        "data": data,
        "arguments": {"warm_up": args.warm_up, "steps": args.steps, "rounds": args.rounds},
        "machine": machine(),
        "versions": versions(),
        "commit": git_commit(),
        "busy_elsewhere_cores": (_busy_elsewhere_s() - busy) / (time.monotonic() - began),
    }
    print(*tables(results), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(results))
    if args.markdown:
        args.markdown.write_text(markdown(results))
    return 0


def _rounds(
    bench: Bench, stage: int, ranks: int, args: argparse.Namespace
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Yield the measurements of each round: by side, a list over its ranks."""
    for number in range(args.rounds):
        first = number % len(SIDES)
        measurements = {}
        for side in (*SIDES[first:], *SIDES[:first]):
            _say(f"ZeRO {stage}, ranks {ranks}, round {number + 1} of {args.rounds}: {side}")
            measurements[side] = bench.measure(side, stage, ranks, 0 if number else COUNTED)
        yield measurements


def _busy_elsewhere_s() -> float:
    """Seconds that cores spent on others than this process and its children; NaN off Linux."""
    if not PROC_STAT.exists():
        return math.nan
    ticks = [int(text) for text in PROC_STAT.read_text().split("\n", 1)[0].split()[1:]]
    idle = ticks[3] + ticks[4]  # and waiting for disks
    ours = sum(os.times()[:4])
    return (sum(ticks[:8]) - idle) / os.sysconf("SC_CLK_TCK") - ours


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3], metavar="STAGE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="RANKS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed, in each process")
    # In its first three steps the harness also compares the memory it holds with the estimate.
    parser.add_argument("--warm-up", type=int, default=4, help="steps before, at least one")
    parser.add_argument("--data-rounds", type=int, default=3, help="of the data path alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
