"""The same job on other numbers of GPUs, with other lengths, on other GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from copy import copy

from harness.errors import ConfigError
from harness.estimate.hardware import find_gpu
from tools.cluster.ask import question_of
from tools.cluster.count import Counted, days
from tools.cluster.search import count_all

_OTHER_GPUS = ("a100-80", "h100-80", "h200", "b200")


def what_if(args: argparse.Namespace, best: Counted | None) -> list[str]:
    """Return a line for each change of the question, with the best layout of each."""
    lines = ["", "What if"]
    for name, changed in _changes(args):
        try:
            answer = _answer(changed)
        except ConfigError as error:
            answer = str(error.problems[0])
        lines.append(f"  {name:<16} {answer}")
    return lines


def _changes(args: argparse.Namespace) -> Iterator[tuple[str, argparse.Namespace]]:
    for factor in (0.5, 2, 4):
        gpus = int(args.gpus * factor)
        if gpus >= 1:
            yield f"{gpus} GPUs", _with(args, gpus=gpus)
    yield f"{2 * args.seq_len:,} tokens", _with(args, seq_len=2 * args.seq_len)
    for gpu in _OTHER_GPUS:
        if find_gpu(gpu) is not find_gpu(args.gpu):  # whose rates nobody measured
            yield gpu, _with(args, gpu=gpu, measured=None, rates=None)


def _with(args: argparse.Namespace, **changes: object) -> argparse.Namespace:
    changed = copy(args)
    vars(changed).update(changes)
    return changed


def _answer(args: argparse.Namespace) -> str:
    question = question_of(args)
    counted = count_all(args, question)
    if not counted or not counted[0].answers:
        return "nothing fits"
    best = counted[0]
    job = question.job(best)
    return f"{days(job.seconds)}, {job.gpu_hours:,.0f} GPU-hours: {best.layout.text}"
