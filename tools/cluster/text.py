"""Formats the planner's answer as text of 80 columns."""

import argparse
import json
import textwrap
from collections.abc import Mapping

from harness.config.assignments import value_as_text
from harness.estimate.memory_item import GIB
from harness.estimate.step_time.job import DAY, Job
from harness.estimate.step_time.machine import NETWORK_REACHED
from harness.plan.duration import shares_of
from harness.plan.model_config import published_weights
from harness.report.formatting import short
from tools.cluster.ask import weights_of
from tools.cluster.choose import Answer, error_text, why_not
from tools.cluster.count import Counted, Question, days
from tools.cluster.job import commands, settings

WIDTH = 80


def describe(args: argparse.Namespace, question: Question, answer: Answer) -> str:
    """Return the whole answer as text."""
    counted, best = answer.counted, answer.best
    fit = sum(bool(each.fits) for each in counted)
    shape = question.some.shape
    head = (
        f"{args.model} ({shape.parameters / 1e9:.2f}B parameters) on {args.gpus} x {args.gpu}, "
        f"{question.some.precision}, "
        f"{args.seq_len:,} tokens, {args.global_batch:,} samples per step: {len(counted):,} "
        "layouts, "
        f"{fit:,} known to fit"
    )
    lines = [*textwrap.wrap(head, WIDTH), *_start(args, question), ""]
    if best is None:
        nearest = sorted(answer.ways.items(), key=lambda way: counted.index(way[1]))
        why = "Nothing fits. The nearest:"
        if question.budget and counted[0].fits is not False:
            tokens = question.data_tokens * question.budget / question.cost(counted[0])
            why = f"Nothing is within the budget, which pays for about {short(tokens, 3)} tokens:"
        return "\n".join([*lines, why, *_rows(dict(nearest), None)])
    others = ["", "Why not ...?", *_rows(answer.ways, best)] if answer.ways else []
    return "\n".join(
        [
            *(*lines, *_job(args, question, best, question.job(best)), ""),
            *(*_on_paper(answer), *others),
            *("", *_ready(args, best), "", *_evidence(question, best)),
        ]
    )


def _start(args: argparse.Namespace, question: Question) -> list[str]:
    """Return lines about the weights that a job starts from, if it might start from others."""
    weights, published = weights_of(args, question.run), published_weights(args.model)
    text = f"It starts from the weights of {weights}." if weights else ""
    if published and not weights:
        text = f"It starts from random weights. From the published ones: --init-from {published}"
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def _job(args: argparse.Namespace, question: Question, best: Counted, job: Job) -> list[str]:
    time = best.time
    lines = [
        *textwrap.wrap(f"Recommended: {best.layout.text}", WIDTH, subsequent_indent=" " * 13),
        *(["  with Liger's kernels (model.kernels)"] if best.inputs.liger else []),
        *(["  with compiled layers (model.compile)"] if best.inputs.compiled else []),
        f"  {memory_text(best)}",
        f"  {time.seconds:.2f} s per step, {time.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, "
        f"MFU {time.mfu:.1%}",
        *(f"  {part}" for part in textwrap.wrap(error_text(best), WIDTH - 2)),
        *(
            f"  {'' if n else 'time: '}{part}"
            for n, part in enumerate(textwrap.wrap(", ".join(shares_of(best.time)), WIDTH - 8))
        ),
        f"  {short(question.data_tokens, 4)} tokens: {days(job.seconds)}, "
        f"{job.gpu_hours:,.0f} GPU-hours, {job.energy_kwh:,.0f} kWh for the GPUs",
        *_beside(question, best),
        f"  with failures {days(job.days_with_failures * DAY)}: one in "
        f"{days(job.failure_seconds)}, a save every {job.save_every_seconds / 60:.0f} minutes",
    ]
    if question.price is not None:
        lines.append(f"  cost {job.cost(question.price):,.0f} at {question.price:g} per GPU-hour")
    if args.deadline_days:
        late = job.days_with_failures > args.deadline_days
        more = -(-job.days_with_failures * args.gpus // args.deadline_days)
        met = f"missed: about {more:,.0f} such GPUs would meet it" if late else "met"
        lines.append(f"  the deadline of {args.deadline_days:g} days is {met}")
    return lines


def memory_text(counted: Counted) -> str:
    """Return a layout's memory as text: the upper end, the GPU's memory, the lower end."""
    low, high = counted.peak_interval
    device = counted.question.device_bytes
    return (
        f"up to {high / GIB:.1f} of {device / GIB:.1f} GiB of the fullest GPU, "
        f"{low / GIB:.1f} at least"
    )


def _on_paper(answer: Answer) -> list[str]:
    best, quickest = answer.best, answer.quickest
    assert best is not None
    assert quickest is not None
    if quickest is best:
        return ["It is also the quickest on paper."]
    text = (
        f"Quickest on paper: {quickest.layout.text}, {quickest.seconds:.2f} s, "
        f"{memory_text(quickest)}: {why_not(quickest, best)}"
    )
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _beside(question: Question, best: Counted) -> list[str]:
    beside, run = question.beside(best), question.run
    sets = f"{run.data.evaluated_sets} x " if run.data.evaluated_sets > 1 else ""
    often = f"{sets}{run.eval.samples} samples every {run.eval.every} steps"
    often = often if run.eval.every else "none"
    asked = f", {beside.saves:,} of them" if beside.saves else ""
    waits = "prefetched, no wait" if run.data.prefetch else "not prefetched: waits are not counted"
    text = (
        f"evaluation {days(beside.evaluating)} of these ({often}); a save {beside.save_text}{asked}"
        f" ({question.disk_gb_per_s:g} GB/s per node, --disk); data {waits}"
    )
    return [f"  {part}" for part in textwrap.wrap(text, WIDTH - 2)]


def _rows(ways: Mapping[str, Counted], best: Counted | None) -> list[str]:
    lines = [
        f"  {'':10} {'s/step':>7} {'GiB':>6}  the best of its kind, and why it is not recommended"
    ]
    for way, each in ways.items():
        low, high = each.peak_interval
        head = f"  {way:10} {each.seconds:7.2f} {max(low, high) / GIB:6.1f}  "
        rest = f"{each.layout.text}: {why_not(each, best)}"
        parts = textwrap.wrap(rest, WIDTH - len(head))
        lines += [(" " * len(head) if n else head) + part for n, part in enumerate(parts)]
    return lines


def _ready(args: argparse.Namespace, best: Counted) -> list[str]:
    keys = " ".join(f"{key}={value_as_text(value)}" for key, value in settings(args, best).items())
    return [
        "Ready to run (--write FOLDER writes these files):",
        f"  ds.json: {json.dumps(best.deepspeed)}",
        f"  run.toml: {keys}",
        *(f"  {name}: {command}" for name, command in commands(args, best, "", "").items()),
    ]


def _evidence(question: Question, best: Counted) -> list[str]:
    host = question.host_bytes / GIB
    network = question.machine.network_rate / NETWORK_REACHED / 1e9
    text = (
        f"Memory: {best.memory.evidence}; time: {best.time.evidence}; evaluation, saves and "
        "failures: guessed. "
        f"It assumes a network of {network:g} GB/s per GPU (--network) and {host:,.0f} GiB of "
        "host memory (--host-memory). docs/evidence.md compares such estimates with published "
        "runs. --json lists every layout."
    )
    return textwrap.wrap(text, WIDTH)
