"""The spread of a step's time over starts: percentiles, and a picture with a point for each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from tools.figure import new_figure
from tools.proofs.overhead.job import LAYERS
from tools.proofs.overhead.turns import turn_medians_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"harness": "the harness", "bare": "bare DeepSpeed", "trainer": "Trainer"}
COMPARED = ("harness", "bare")
"""The two sides whose ratio is to be 1."""
Cell = dict[str, Any]
_KERNEL_NAMES = {
    "kernel_ms": "milliseconds in it",
    "page_faults": "page faults",
    "waits": "switches of a thread that waits",
    "preemptions": "switches of a thread that is sent away",
    "density": "share of its 2 MiB blocks that its pages fill",
}


def name_of(cell: Cell) -> str:
    """Return "ZeRO 3, 2 ranks", and the layers where they are unusual."""
    layers = f", {cell['layers']} layers" * (cell["layers"] != LAYERS)
    return f"ZeRO {cell['stage']}, {cell['ranks']} rank{'s' * (cell['ranks'] > 1)}{layers}"


def seconds(cell: Cell, side: str) -> list[float]:
    """Return each start's median step, in seconds."""
    return [seconds_of(round_[side]) for round_ in cell["rounds"]]


def seconds_of(ranks: Sequence[Any]) -> float:
    """Return a start's median step, in seconds."""
    return statistics.median(ranks[0]["step_s"])


def spread_rows(cells: Sequence[Cell], turns: int) -> Iterator[tuple[str, list[str]]]:
    """Yield rows of (title, a text per cell): percentiles of the ratios of all starts, and whether
    a ratio is the start's or the turn's.
    """
    yield "rounds", [f"{len(cell['rounds'])}" for cell in cells]
    for over, under in (("harness", "bare"), ("harness", "trainer")):
        each = [
            [a / b for a, b in zip(seconds(cell, over), seconds(cell, under), strict=True)]
            for cell in cells
        ]
        yield f"{NAMES[over]} / {NAMES[under]}", [percentiles(ratios) for ratios in each]
    for place, name in enumerate(("first", "second", "last")):
        effects = [place_effects(cell)[place] for cell in cells]
        yield f"time where started {name} / the side's mean", [f"{e:.3f}" for e in effects]
    follows = [follows_density(cell) for cell in cells]
    yield (
        "correlation of a start's time with the density of its pages",
        [f"{r:.2f}" for r in follows],
    )
    apart = [spread_of(turn_ratios(cell["rounds"], turns)) for cell in cells]
    yield (
        "the harness / bare DeepSpeed: standard deviation between turns",
        [f"{spread.turn:.1%}" for spread in apart],
    )
    yield (
        "standard deviation between starts, beyond turns",
        [f"{spread.start:.1%}" for spread in apart],
    )


def place_effects(cell: Cell) -> list[float]:
    """Return the time of the first, the second and the last start of a round, over the mean of its
    side and of its round: geometric means over rounds and sides.
    """
    rounds = residuals(cell, lambda ranks: math.log(seconds_of(ranks)))
    return [math.exp(statistics.fmean(values)) for values in zip(*rounds, strict=True)]


def follows_density(cell: Cell) -> float:
    """Return the correlation of a start's time with the density of its pages, both beside the mean
    of its side and of its round; NaN where densities are not known or all alike.
    """
    times = residuals(cell, lambda ranks: math.log(seconds_of(ranks)))
    densities = residuals(cell, lambda ranks: float(ranks[0]["density"]))
    try:
        return statistics.correlation(list(chain(*times)), list(chain(*densities)))
    except statistics.StatisticsError:
        return math.nan


def residuals(cell: Cell, value: Callable[[list[Any]], float]) -> list[list[float]]:
    """Return a value of each start less the mean of its side and of its round, by round in the
    order of the starts.
    """
    rounds = [{side: value(ranks) for side, ranks in sides.items()} for sides in cell["rounds"]]
    of_side = {side: statistics.fmean(values[side] for values in rounds) for side in NAMES}
    residual = []
    for values in rounds:
        left = [each - of_side[side] for side, each in values.items()]
        residual.append([each - statistics.fmean(left) for each in left])
    return residual


def turn_ratios(rounds: Sequence[Any], turns: int) -> list[list[float]]:
    """Return the harness's time over bare DeepSpeed's, of each round a value for each turn."""
    return [
        [
            ours / theirs
            for ours, theirs in zip(
                turn_medians_s(sides["harness"][0], turns),
                turn_medians_s(sides["bare"][0], turns),
                strict=True,
            )
        ]
        for sides in rounds
    ]


@dataclass(frozen=True)
class Spread:
    """Standard deviations, relative; NaN of too few values."""

    turn: float
    """Of the turns of one start."""
    start: float
    """Of starts, beyond what their turns explain."""


def spread_of(times: Sequence[Sequence[float]]) -> Spread:
    """Split the spread of `times`, of each start a value for each turn: random effects of one
    factor (Montgomery, Design and Analysis of Experiments, 3.9), from logarithms.
    """
    logs = [[math.log(value) for value in values] for values in times]
    turns = min(map(len, logs), default=0)
    if len(logs) < 2 or turns < 2:
        return Spread(math.nan, math.nan)
    within = statistics.fmean(statistics.variance(values) for values in logs)
    between = turns * statistics.variance([statistics.fmean(values) for values in logs])
    return Spread(math.sqrt(within), math.sqrt(max(0.0, between - within) / turns))


def kernel_rows(cells: Sequence[Cell]) -> Iterator[tuple[str, list[str]]]:
    """Yield rows of (title, a text per cell): what the kernel did for rank 0 in a step, the median
    over starts and in brackets the least and the most.
    """
    for kind, title in _KERNEL_NAMES.items():
        for side, name in NAMES.items():
            yield f"{title}: {name}", [_over_starts(cell, side, kind) for cell in cells]


def _over_starts(cell: Cell, side: str, kind: str) -> str:
    starts = (round_[side][0][kind] for round_ in cell["rounds"])
    values = [statistics.median(of if isinstance(of, list) else [of]) for of in starts]
    how = ".2f" if kind == "density" else ",.0f"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{how}} ({low:{how}} to {high:{how}})"


def picture(results: dict[str, Any]) -> Figure:
    """Return a picture in which every start of every side is a point."""
    cells = results["cells"]
    figure = new_figure(
        7.2, 3.4, "A step of each start, beside bare DeepSpeed's median", "lines are medians"
    )
    axis = figure.subplots()
    for place, side in enumerate(NAMES):
        for number, cell in enumerate(cells):
            usual, values = statistics.median(seconds(cell, "bare")), seconds(cell, side)
            ratios = [value / usual for value in values]
            left = number + 0.27 * (place - 1.4)
            # From left to right as they were measured: a drift of the machine is a slope.
            across = [left + 0.22 * n / max(len(ratios) - 1, 1) for n in range(len(ratios))]
            axis.plot(across, ratios, "o", ms=3, alpha=0.6, color=f"C{place}", mew=0)
            median = statistics.median(ratios)
            ends = [left - 0.02, left + 0.24]
            axis.plot(ends, [median] * 2, color=f"C{place}", label=None if number else NAMES[side])
    axis.set_xticks(range(len(cells)), [name_of(cell).replace(", ", "\n") for cell in cells])
    axis.legend(ncols=len(NAMES), loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def percentiles(ratios: Sequence[float]) -> str:
    """Return below which of them 5 %, half and 95 % lie; "-" of a single one."""
    if len(ratios) < 2:
        return "-"
    twentieths = statistics.quantiles(ratios, n=20, method="inclusive")
    low, middle, high = twentieths[0], twentieths[9], twentieths[18]
    return f"{low:.2f}, **{middle:.3f}**, {high:.2f}"
