"""Measure the memory that each way to take long samples saves, and its cost.

    python tools/proofs/measure_ladder.py --out FOLDER --markdown docs/ladder.md

A small decoder trains a step of one sample of 32,768 tokens in fp32 on CPU ranks: the bytes that a
rank held at most during its forward and backward pass, beside the estimate, and CPU seconds. Then
the longest sample that 4 GiB hold by the estimate, with two rungs measured at their longest. Exit
code 1 where a measurement is more than 5 % off. Measurements in FOLDER are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(REPOSITORY)

from harness.estimate.units import GIB
from harness.layout.recompute import flops_again
from harness.layout.shape import flops_per_token
from harness.layout.world import World
from tools.made_with import machine, versions
from tools.proofs.jobs import Group, run_jobs
from tools.proofs.ladder.rungs import DOCUMENT, RUNGS, TOKENS, Job, write_model

LIMIT_BYTES = 4 * GIB
AT_THEIR_LONGEST = ("none", "selective")
TOLERANCE = 0.05


def main() -> int:
    """Command line -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="keep the measurements here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--as-is", action="store_true", help="measure nothing more")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    write_model(out)
    jobs = [Job(name) for name in RUNGS]
    longest = {job: job.longest(LIMIT_BYTES, out) for job in jobs}
    near = [long for job, long in longest.items() if job.rung in AT_THEIR_LONGEST]
    missing = [job for job in (*jobs, *near) if not _is_measured(job, out)]
    run_jobs("ladder", [] if args.as_is else missing, out, lambda job: Group(0, job.ranks))
    text = _page(jobs, longest, near, out)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    print(text)
    done = [job for job in (*jobs, *near) if _is_measured(job, out)]
    off = [job.label for job in done if abs(_error(job, out)) > TOLERANCE]
    print(f"{len(done)} measured, off by more than {TOLERANCE:.0%}: {off or 'none'}")
    return 1 if off else 0


def _kept(job: Job, out: Path, rank: int = 0) -> Path:
    return out / f"{job.label}.rank{rank}.json"


def _is_measured(job: Job, out: Path) -> bool:
    return _kept(job, out, job.ranks - 1).exists()


def _measured(job: Job, out: Path) -> dict[str, Any]:
    """The rank that held most, with the CPU seconds of all."""
    each = [json.loads(_kept(job, out, rank).read_text()) for rank in range(job.ranks)]
    return {"bytes": max(m["bytes"] for m in each), "cpu_s": sum(m["cpu_s"] for m in each)}


def _error(job: Job, out: Path) -> float:
    return job.estimated_bytes(out) / _measured(job, out)["bytes"] - 1


def _sizes(job: Job, out: Path) -> list[str]:
    estimated = f"{job.estimated_bytes(out) / GIB:.3f}"
    if not _is_measured(job, out):
        return [estimated, "", ""]
    return [estimated, f"{_measured(job, out)['bytes'] / GIB:.3f}", f"{_error(job, out):+.1%}"]


def _arithmetic(job: Job, out: Path) -> float:
    """Operations of a token over those without anything computed again."""
    plan = job.plan(World(0, job.ranks, 0, job.ranks), out)
    assert plan.shape is not None, "a llama's shape is known"
    whole = flops_per_token(plan.shape, DOCUMENT)
    tiles = plan.config.model.mlp_tiles
    return 1 + sum(flops_again(plan.shape, DOCUMENT, plan.checkpointing, tiles)) / whole


def _page(jobs: list[Job], longest: dict[Job, Job], near: list[Job], out: Path) -> str:
    base = _measured(jobs[0], out)["cpu_s"]
    lines = [
        _HEADING.format(tokens=TOKENS, document=DOCUMENT, on=machine(), versions=versions()),
        "| rung | estimated GiB | measured GiB | error | arithmetic | CPU time | "
        f"longest sample in {LIMIT_BYTES // GIB} GiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for job in jobs:
        seconds = f"{_measured(job, out)['cpu_s'] / base:.2f}" if _is_measured(job, out) else ""
        cells = [job.rung, *_sizes(job, out), f"{_arithmetic(job, out):.2f}", seconds]
        lines.append(f"| {' | '.join([*cells, f'{longest[job].tokens:,}'])} |")
    if near := [job for job in near if _is_measured(job, out)]:
        lines += ["", "At their longest:", ""]
        lines += ["| rung | tokens | estimated GiB | measured GiB | error |"]
        lines += ["|---|---:|---:|---:|---:|"]
        for job in near:
            lines.append(f"| {' | '.join([job.rung, f'{job.tokens:,}', *_sizes(job, out)])} |")
    return "\n".join([*lines, ""])


_HEADING = """\
# The ladder of memory for long samples

A Llama of 4 layers, 64 wide, with 2,048 tokens in its vocabulary takes one sample of {tokens:,}
tokens in fp32 with AdamW; tokens attend within documents of {document:,}
(`model.attention=varlen`). GiB are a rank's at most during forward and backward pass, weights and
Adam's moments included (8 MiB); on a CPU what is offloaded counts, too, and its attention holds the
scores of one document at a time three times over, which the estimate leaves out (3 MiB here, and 48
for documents of 1,024 tokens). Arithmetic and CPU time of all ranks are relative to the first rung;
empty cells were not measured. The machine was shared: CPU time is the user time of one step, of
which a tenth and more is noise.

Tiles and chunks: `model.mlp_tiles=8`, `model.loss_chunk=128`; other rungs hold all logits. Two
ranks share the sample (`sequence_parallel_size=2`, ZeRO 1); the profiler, by which bytes are
measured, does not see what gloo's own threads free, and so shows too much of them: followed tensor
by tensor at 8,192 tokens, the last rung holds what is estimated within a few per cent.

{on}, {versions}. Written by
`python tools/proofs/measure_ladder.py --out FOLDER --markdown docs/ladder.md`.
"""


if __name__ == "__main__":
    sys.exit(main())
