"""Plans variants of a job: other numbers of GPUs, sequence lengths and GPU types."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.errors import ConfigError
from harness.estimate.hardware import find_gpu
from harness.estimate.step_time.job import DAY
from tools.cluster.ask import question_of
from tools.cluster.choose import Answer
from tools.cluster.count import Counted, days
from tools.cluster.layouts import MOST_MICRO_BATCH
from tools.cluster.search import answer as answer_to

_OTHER_GPUS = ("a100-80", "h100-80", "h200", "b200")
_COUNTS = (0.25, 0.5, 2, 4, 8)
"""Factors for the number of GPUs."""
_TRIED = 8
"""Number of fastest and of smallest layouts of a micro-batch that are checked for fit."""


@dataclass(frozen=True)
class Spent:
    """Time and cost of the best layout on a number of GPUs."""

    gpus: int
    days: float
    """Including failures."""
    cost: float
    """In the price's currency, or in GPU-hours without a price."""
    layout: str


def what_if(args: argparse.Namespace, answer: Answer) -> list[str]:
    """Return a line for each change of the question, with its best layout."""
    lines = ["", "What if"]
    for name, changed in _changes(args):
        lines.append(f"  {name:<16} {_answer(changed)}")
    if answer.best is not None:
        lines += [f"  {'micro-batch':<16} {largest_micro_batch(answer.counted)}"]
        lines += ["", "How many GPUs: none of these is both slower and more expensive than another"]
        lines += _front_lines(args, answer.best)
    return lines


def largest_micro_batch(counted: Sequence[Counted]) -> str:
    """Describe the fastest of the layouts that fit with the largest possible micro-batch."""
    by_size: dict[int, list[Counted]] = {}
    for each in counted:
        if each.fits is not False:
            by_size.setdefault(each.layout.micro_batch, []).append(each)
    for size in sorted(by_size, reverse=True):
        # Also try the smallest: if they do not fit, no layout with this micro-batch does.
        smallest = sorted(by_size[size], key=lambda each: each.peak_bytes)[:_TRIED]
        quickest = sorted(by_size[size], key=lambda each: each.seconds)[:_TRIED]
        fit = [each for each in (*quickest, *smallest) if each.is_usable()]
        if fit:
            best = min(fit, key=lambda each: each.seconds)
            more = " is the largest counted" if size == MOST_MICRO_BATCH else " at most"
            return f"{size}{more}, {best.seconds:.2f} s per step: {best.layout.text}"
    return "nothing fits"


def front_of(spent: Sequence[Spent]) -> list[Spent]:
    """Return the Pareto front of time and cost, cheapest first."""
    kept: list[Spent] = []
    for each in sorted(spent, key=lambda one: (one.cost, one.days)):
        if not kept or each.days < kept[-1].days:
            kept.append(each)
    return kept


def _front_lines(args: argparse.Namespace, best: Counted) -> list[str]:
    spent = [_spent(best)]
    for factor in _COUNTS:
        gpus = int(args.gpus * factor)
        other = _best(_with(args, gpus=gpus)) if gpus >= 1 else None
        if isinstance(other, Counted):
            spent.append(_spent(other))
    unit = f"at {args.price:g} per GPU-hour" if args.price else "GPU-hours"
    return [
        f"  {f'{each.gpus} GPUs':<16} {days(each.days * DAY)}, {each.cost:,.0f} {unit}: "
        f"{each.layout}"
        for each in front_of(spent)
    ]


def _spent(best: Counted) -> Spent:
    job = best.question.job(best)
    cost = job.cost(best.question.price or 1.0)
    return Spent(best.question.gpus, job.days_with_failures, cost, best.layout.text)


def _changes(args: argparse.Namespace) -> Iterator[tuple[str, argparse.Namespace]]:
    yield f"{2 * args.seq_len:,} tokens", _with(args, seq_len=2 * args.seq_len)
    for gpu in _OTHER_GPUS:
        if find_gpu(gpu) is not find_gpu(args.gpu):  # their rates were not measured
            yield gpu, _with(args, gpu=gpu, measured=None, rates=None)


def _with(args: argparse.Namespace, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), **changes})


def _best(args: argparse.Namespace) -> Counted | str:
    """Return the best layout of a question, or the reason why there is none."""
    try:
        return answer_to(args, question_of(args)).best or "nothing fits"
    except ConfigError as error:
        return str(error.problems[0])


def _answer(args: argparse.Namespace) -> str:
    best = _best(args)
    if isinstance(best, str):
        return best
    job = best.question.job(best)
    return f"{days(job.seconds)}, {job.gpu_hours:,.0f} GPU-hours: {best.layout.text}"
