"""Time the harness against a bare DeepSpeed loop and the Hugging Face Trainer.

    python tools/proofs/benchmark_overhead.py
    python tools/proofs/benchmark_overhead.py --stages 3 --ranks 1 --rounds 6

25 million parameters on CPU ranks, the same weights, batches and resolved JSON for all three: the
harness with its run folder and a line of metrics in every step; a loop that does nothing but train;
the Trainer with its log in every step. In every round each of them is started anew, one after the
other, and waits; then all three train in turns, so that none meets a slower machine than the
others. What a step frees, malloc keeps for all three, as the harness has it. Further, how often the
host would wait for a device, and how fast data comes without a model. A round takes three minutes
on two quiet cores. Ctrl-C ends after the rounds that are whole, with their tables; --out keeps each
of them as a file, and goes on with those that are there; --results draws the tables again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(REPOSITORY)

from harness.run.plan_record import git_commit
from tools.figure import write_plot
from tools.made_with import cpu_precision, machine, versions
from tools.proofs.overhead.data_path import data_rates
from tools.proofs.overhead.job import LAYERS
from tools.proofs.overhead.kept import keep, kept
from tools.proofs.overhead.prepare import Bench, prepare
from tools.proofs.overhead.report import SIDES, markdown, tables
from tools.proofs.overhead.spread import name_of, picture
from tools.proofs.overhead.turns import COUNTED, Length, Start, order_of, take_turns

PROC_STAT = Path("/proc/stat")


def main() -> int:
    """Command line -> exit code."""
    args = _arguments()
    if args.results:
        results = json.loads(args.results.read_text())
        if args.starts:
            results["starts"] = json.loads(args.starts.read_text())["cells"]
    else:
        with tempfile.TemporaryDirectory() as temporary:
            results = _measure(Path(temporary), args)
    print(*tables(results), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(results))
    if args.markdown:
        args.markdown.write_text(markdown(results))
        write_plot(args.markdown.with_suffix(".svg"), picture(results))
    return 0


def _measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return every number, with where it was measured."""
    began, busy = time.monotonic(), _busy_elsewhere_s()
    length, out = Length.of(args), args.out or folder / "rounds"
    benches = {n: prepare(folder / str(n), n) for n in args.layers}
    cells: list[dict[str, Any]] = [
        {"stage": stage, "ranks": ranks, "layers": layers, "rounds": []}
        for stage, ranks, layers in product(args.stages, args.ranks, args.layers)
    ]
    try:
        for number in range(args.rounds):
            measured = []
            for cell in cells:
                _say(f"round {number + 1} of {args.rounds}, {name_of(cell)}")
                measured.append(_round(benches[cell["layers"]], cell, number, length, out))
            for cell, sides in zip(cells, measured, strict=True):
                cell["rounds"].append(sides)
    except KeyboardInterrupt:
        if not cells[0]["rounds"]:
            raise
    _say("the data path")
    data = list(data_rates(benches[args.layers[0]].data, args.data_rounds))
    return {
        "cells": cells,
        "data": data,
        "arguments": {
            name: getattr(args, name) for name in ("rounds", "warm_up", "turns", "steps")
        },
        "machine": machine(),
        "precision": cpu_precision(),
        "versions": versions(),
        "commit": git_commit(),
        "busy_elsewhere_cores": (_busy_elsewhere_s() - busy) / (time.monotonic() - began),
    }


def _round(
    bench: Bench, cell: dict[str, Any], number: int, length: Length, out: Path
) -> dict[str, list[dict[str, Any]]]:
    """Return what `_measure_round` does, from the file in `out` if it has been measured."""
    about = [name_of(cell), *(f"{value}" for value in asdict(length).values()), f"{number}"]
    path = out / f"{'-'.join(about).replace(', ', '-').replace(' ', '-')}.json"
    measured: dict[str, list[dict[str, Any]]] | None = kept(path)
    if measured is None:
        measured = _measure_round(bench, cell, number, length)
        keep(path, measured)
    return measured


def _measure_round(
    bench: Bench, cell: dict[str, Any], number: int, length: Length
) -> dict[str, list[dict[str, Any]]]:
    """Return the measurements of one round of a cell: by side, a list over its ranks."""
    with contextlib.ExitStack() as alive:
        starts: dict[str, Start] = {}
        for side in order_of(SIDES, number):
            starts[side] = alive.enter_context(
                bench.start(side, cell["stage"], cell["ranks"], length)
            )
        take_turns(list(starts.values()), length)
        if not number:
            for start in starts.values():
                start.train(COUNTED, counted=True)
        return {side: start.finish() for side, start in starts.items()}


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
    parser.add_argument("--layers", type=int, nargs="+", default=[LAYERS], metavar="LAYERS")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3], metavar="STAGE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="RANKS")
    parser.add_argument("--rounds", type=int, default=24)
    Length.add_arguments(parser)
    parser.add_argument("--data-rounds", type=int, default=3, help="of the data path alone")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the rounds; resumes")
    parser.add_argument("--results", type=Path, metavar="FILE", help="of --json: measure nothing")
    parser.add_argument("--starts", type=Path, metavar="FILE", help="of --json: start-ups, instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables here, beside them a picture"
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
