"""Measure the cost of checkpoints: ours against DeepSpeed's own, in one run on one disk.

    python tools/proofs/benchmark_checkpoint.py
    python tools/proofs/benchmark_checkpoint.py --stages 3 --rounds 9 --folder /scratch

Two CPU ranks, 61 million parameters, ZeRO 1 and 3. In every round: a blocking save of ours (hashed
and synced to disk) and `save_checkpoint` of DeepSpeed as it is (neither), in turns the first of the
two; a save of ours in the background while training goes on; and reading: the bytes once by plain
read(), and verifying and loading them. Medians over the rounds, after one that is not counted. A
line of JSON for each stage and a table.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(REPOSITORY)

from harness.launch.ranks import run_module
from tools.made_with import machine

RATIOS = {  # what: (over, what, the most it may be)
    "blocking save / DeepSpeed's": ("blocking", "plain", 1.1),
    "blocking save / DeepSpeed's and a sync of its files": ("blocking", "plain_synced", 1.1),
    "stall of a background save / blocking save": ("stall", "blocking", 0.25),
    "resume / reading the bytes once, from disk": ("resume_cold", "read_cold", 1.5),
}
SECONDS = {
    "blocking": "blocking save, hashed and synced",
    "plain": "DeepSpeed's save_checkpoint, neither",
    "plain_synced": "the same, and then a sync of its files",
    "stall": "background save: training waits",
    "background": "background save: until it is whole",
    "step": "a training step",
    "step_meanwhile": "a training step beside a background save",
    "probe": "the probe's forward pass, which every save adds",
    "read_cached": "reading the bytes once, page cache",
    "verify_cached": "verifying, page cache",
    "resume_cached": "verifying and loading, page cache",
    "refresh": "of loading: DeepSpeed makes and gathers the weights it computes with",
    "read_cold": "reading the bytes once, disk",
    "resume_cold": "verifying and loading, disk",
}


def main() -> int:
    """Command line -> exit code."""
    args = _arguments()
    results = {}
    for stage in args.stages:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            out = Path(scratch)
            arguments = [f"--stage={stage}", f"--rounds={args.rounds}", f"--out={out}"]
            run_module("tools.proofs.checkpoints.speed", arguments, 2, errors=out)
            results[stage] = _judged(json.loads((out / "speed.json").read_text()))
        print(json.dumps({"stage": stage, **results[stage]}), flush=True)
    table = "\n".join(_table(results))
    print(table)
    if args.markdown:
        args.markdown.write_text(_markdown(table, args.rounds, results))
    return 0


def _judged(results: dict[str, Any]) -> dict[str, Any]:
    for kind in ("seconds", "processor"):
        both = zip(results[kind]["plain"], results[kind]["plain_fsync"], strict=True)
        results[kind]["plain_synced"] = [sum(pair) for pair in both]
    medians = {name: statistics.median(values) for name, values in results["seconds"].items()}
    ratios = {name: medians[over] / medians[under] for name, (over, under, _) in RATIOS.items()}
    for name, (over, under, _) in RATIOS.items():
        if {over, under} <= results["processor"].keys():
            worked = [statistics.median(results["processor"][key]) for key in (over, under)]
            ratios[f"{name}, processor"] = worked[0] / worked[1]
    ratios["bytes on disk / DeepSpeed's"] = results["bytes"]["ours"] / results["bytes"]["plain"]
    return {**results, "medians": medians, "ratios": ratios}


def _table(results: dict[int, dict[str, Any]]) -> list[str]:
    stages = "".join(f" ZeRO {stage} |" for stage in results)
    lines = [
        f"| ratio of medians; the same of the processor's seconds | goal |{stages}",
        "|---|---:|" + "---:|" * len(results),
    ]
    limits = {name: limit for name, (*_, limit) in RATIOS.items()}
    for name, limit in (limits | {"bytes on disk / DeepSpeed's": 1.0}).items():
        cells = "".join(f" {_ratio(judged['ratios'], name)} |" for judged in results.values())
        lines.append(f"| {name} | {limit:g} |{cells}")
    title = "seconds: median (least to most); median of the processor's, of both ranks"
    lines += ["", f"| {title} |{stages}", "|---|" + "---:|" * len(results)]
    for name, text in SECONDS.items():
        cells = "".join(f" {_seconds(judged, name)} |" for judged in results.values())
        lines.append(f"| {text} |{cells}")
    for name, text in (("ours", "ours"), ("plain", "DeepSpeed's")):
        cells = "".join(f" {judged['bytes'][name] / 1e6:,.1f} |" for judged in results.values())
        lines.append(f"| MB on disk: {text} |{cells}")
    return lines


def _ratio(ratios: dict[str, float], name: str) -> str:
    worked = ratios.get(f"{name}, processor")
    return f"{ratios[name]:.2f}" + (f"; {worked:.2f}" if worked else "")


def _seconds(judged: dict[str, Any], name: str) -> str:
    values, worked = judged["seconds"][name], judged["processor"].get(name)
    text = f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    return f"{text}; {statistics.median(worked):.2f}" if worked else text


def _markdown(table: str, rounds: int, results: dict[int, dict[str, Any]]) -> str:
    parameters = next(iter(results.values()))["parameters"]
    packages = ("torch", "deepspeed", "safetensors")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"""# What checkpoints cost

Written by `python tools/proofs/benchmark_checkpoint.py --markdown PAGE.md`.

{parameters:,} parameters in bf16 with fp32 master weights, two CPU ranks, {rounds} rounds after one
that is not counted; in each round everything one after the other on the same disk. Ours is hashed
(SHA-256) and synced to disk when a save ends, DeepSpeed's is not: what it leaves in the page cache
is synced, and that timed, before the next. Both begin with an empty folder, in turns as the first
of a round; here the second of a round is the slower one, whoever it is. Reading: each byte once,
the files dealt to the two ranks, by plain read() into one buffer; "page cache" drops nothing,
"disk" drops the files from it before.

{table}

Ranks that share busy cores pay for SHA-256 with their own time: hashing goes on beside writing and
while the disk takes the file, which shows only where a core is free; and the wait for the disk,
which DeepSpeed's save leaves out, is part of ours. Syncing while writing was tried once and
showed no clear gain. A resume reads twice, once to verify and once to load: the second time from
memory.

{machine()}, which other processes may use as well; Python {platform.python_version()}, {versions}.
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3], metavar="STAGE")
    parser.add_argument("--rounds", type=int, default=6, help="even: both are first as often")
    parser.add_argument("--folder", type=Path, help="on the disk in question")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
