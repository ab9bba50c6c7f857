"""The layouts of a job as text of 80 columns."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence

from harness.estimate.held import GIB
from harness.estimate.step_time.job import DAY, Job
from harness.estimate.step_time.machine import NETWORK_REACHED
from harness.estimate.step_time.step import TERMS
from tools.cluster.count import (
    SHOWN,
    SMALLER_SHOWN,
    Counted,
    Question,
    best_of_each_way,
    days,
    front,
    tokens_text,
)
from tools.cluster.job import commands, settings

WIDTH = 80


def describe(
    args: argparse.Namespace, question: Question, counted: Sequence[Counted], best: Counted | None
) -> str:
    """Return the whole answer."""
    fit = sum(bool(each.fits) for each in counted)
    undecided = sum(each.fits is None for each in counted)
    more = f", {undecided:,} slower ones may (--all decides)" if undecided else ""
    shape = counted[0].inputs.shape
    head = (
        f"{args.model} ({shape.parameters / 1e9:.2f}B parameters) on {args.gpus} x {args.gpu}, "
        f"{args.seq_len:,} tokens, {args.global_batch:,} samples a step: {len(counted):,} layouts, "
        f"{fit:,} fit{more}"
    )
    lines = [*textwrap.wrap(head, WIDTH), ""]
    if best is None:
        return "\n".join([*lines, *_nothing_fits(counted)])
    job = question.job(best)
    lines += [
        *_job(args, question, best, job),
        "",
        *_table(best_of_each_way(counted)[:SHOWN], best),
    ]
    small = [each for each in front(counted) if each is not best]
    if small:
        lines += ["", "Slower and smaller", *_rows(small[:SMALLER_SHOWN], best)]
    return "\n".join([*lines, "", *_ready(args, best), "", *_evidence(question, best)])


def _job(args: argparse.Namespace, question: Question, best: Counted, job: Job) -> list[str]:
    time = best.time
    lines = [
        *textwrap.wrap(f"Quickest: {best.layout.text}", WIDTH, subsequent_indent=" " * 10),
        f"  {time.seconds:.2f} s a step, {time.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, "
        f"MFU {time.mfu:.1%}; {best.peak_bytes / GIB:.1f} GiB of a GPU",
        *(
            f"  {'' if n else 'time: '}{part}"
            for n, part in enumerate(textwrap.wrap(_shares(best), WIDTH - 8))
        ),
        f"  {tokens_text(question.data_tokens)} tokens: {days(job.seconds)}, "
        f"{job.gpu_hours:,.0f} GPU-hours, {job.energy_kwh:,.0f} kWh of the GPUs",
        *_beside(question, best),
        f"  with failures {days(job.days_with_failures * DAY)}: one in "
        f"{days(job.failure_seconds)}, a save every {job.save_every_seconds / 60:.0f} minutes",
    ]
    if question.price is not None:
        lines.append(f"  cost {job.cost(question.price):,.0f} at {question.price:g} a GPU-hour")
    if args.deadline_days:
        late = job.days_with_failures > args.deadline_days
        more = -(-job.days_with_failures * args.gpus // args.deadline_days)
        met = f"missed: about {more:,.0f} such GPUs would meet it" if late else "met"
        lines.append(f"  the deadline of {args.deadline_days:g} days is {met}")
    return lines


def _beside(question: Question, best: Counted) -> list[str]:
    beside, run = question.beside(best), question.run
    often = f"{run.eval.samples} samples every {run.eval.every} steps" if run.eval.every else "none"
    asked = f", {beside.saves:,} of them" if beside.saves else ""
    waits = (
        "read ahead, no wait" if run.data.prefetch else "not read ahead: its wait is not counted"
    )
    text = (
        f"of these evaluation {days(beside.evaluating)} ({often}); a save {beside.save_text}{asked}"
        f" ({question.disk_gb_per_s:g} GB/s of a node, --disk); data {waits}"
    )
    return [f"  {part}" for part in textwrap.wrap(text, WIDTH - 2)]


def _shares(counted: Counted) -> str:
    terms = sorted(counted.time.terms.items(), key=lambda term: -term[1])
    shares = ((TERMS[name], seconds / counted.time.seconds) for name, seconds in terms)
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.01)


def _table(shown: Sequence[Counted], best: Counted) -> list[str]:
    return ["The best of each way to divide, and why it is not the best", *_rows(shown, best)]


def _rows(shown: Sequence[Counted], best: Counted | None) -> list[str]:
    lines = [f"  {'s/step':>7} {'tokens/s/GPU':>12} {'GiB':>6}  layout"]
    for each in shown:
        lines.append(
            f"  {each.time.seconds:7.2f} {each.time.tokens_per_s_per_gpu:12,.0f} "
            f"{each.peak_bytes / GIB:6.1f}  {each.layout.text}"
        )
        if why := each.why_not(best):
            lines.append(f"{'':30}{why}")
    return [part for line in lines for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * 30) or [""]


def _nothing_fits(counted: Sequence[Counted]) -> list[str]:
    return ["Nothing fits. The nearest:", *_rows(best_of_each_way(counted)[:6], None)]


def _ready(args: argparse.Namespace, best: Counted) -> list[str]:
    keys = " ".join(f"{key}={value}" for key, value in settings(args, best.layout).items())
    return [
        "Ready to run (--write FOLDER makes these files):",
        f"  ds.json: {json.dumps(best.layout.deepspeed)}",
        f"  run.toml: {keys}",
        *(f"  {line}" for line in commands(args, best.layout, "ds.json", "run.toml")),
    ]


def _evidence(question: Question, best: Counted) -> list[str]:
    host = question.host_bytes / GIB
    network = question.machine.network_rate / NETWORK_REACHED / 1e9
    text = (
        f"Memory: {best.memory.evidence}; time: {best.time.evidence}; evaluation, saves and "
        "failures: guessed. "
        f"A network of {network:g} GB/s a GPU (--network) and hosts of {host:,.0f} GiB "
        "(--host-memory) were taken. How near such estimates are to published runs: "
        "docs/evidence.md. --json has every layout."
    )
    return textwrap.wrap(text, WIDTH)
