"""The time of a step over where a start's pages lie in physical memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.figure import new_figure
from tools.proofs.overhead.spread import COMPARED, NAMES
from tools.proofs.overhead.suspects import ALIKE, SUSPECTS, Sides
from tools.proofs.overhead.turns import turn_medians_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Placed:
    """A start beside those of its side that did the same in the same turns."""

    side: str
    is_scattered: bool
    density: float
    """As scatter.density."""
    density_off: float
    """From the mean of those beside it."""
    time: float
    """Of a step, over the mean of those beside it."""


def placed_starts(measured: Sequence[Sides], turns: int) -> Iterator[Placed]:
    """Yield the starts that do the same, of groups in which a side has two of them or more and the
    kernel has told where their pages lie.
    """
    for sides in measured:
        for side in COMPARED:
            ranks = {name: sides[name][side][0] for name in ALIKE if side in sides.get(name, {})}
            densities = {name: float(rank["density"]) for name, rank in ranks.items()}
            if len(ranks) < 2 or any(map(math.isnan, densities.values())):
                continue
            times = {
                name: statistics.fmean(turn_medians_s(rank, turns)) for name, rank in ranks.items()
            }
            density, time = (statistics.fmean(each.values()) for each in (densities, times))
            for name in ranks:
                off = densities[name] - density
                scattered = SUSPECTS[name].scattered
                yield Placed(side, scattered, densities[name], off, times[name] / time)


def fit(starts: Sequence[Placed]) -> str:
    """Return a sentence: how far time follows density, of both what is off the mean beside it."""
    pairs = [(start.density_off, start.time) for start in starts]
    if len(pairs) < 3:
        return "Densities are not known: the kernel shows physical addresses to root alone."
    (slope, _), r = statistics.linear_regression(*zip(*pairs, strict=True)), _correlation(pairs)
    return (
        f"Of {len(pairs)} starts that do the same, each beside the mean of its side and group, "
        f"time and density are correlated by {r:.2f}: where density is 0.1 lower, a step takes "
        f"{-slope / 10:.2%} longer."
    )


def placement_picture(starts: Sequence[Placed]) -> Figure:
    """Return a picture of the time of a step over the density of a start's pages."""
    figure = new_figure(
        7.2, 3.4, "A start's steps, and how densely its pages lie", "1 is the mean of those beside"
    )
    axis = figure.subplots()
    for color, side in zip(("C0", "C1"), COMPARED, strict=True):
        for scattered, marker, title in ((False, "o", ""), (True, "x", ", scattered on purpose")):
            shown = [s for s in starts if (s.side, s.is_scattered) == (side, scattered)]
            densities, times = [s.density for s in shown], [s.time for s in shown]
            axis.plot(densities, times, marker, ms=4, color=color, label=f"{NAMES[side]}{title}")
    axis.set_xlabel("share of their 2 MiB blocks that a start's own pages fill")
    axis.set_ylabel("time of a step")
    axis.legend(ncols=2)
    return figure


def _correlation(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.correlation(*zip(*pairs, strict=True))
