"""How much a step differs from start to start: shares of all starts, and a picture of each."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tools.figure import new_figure
from tools.proofs.overhead.job import LAYERS
from tools.proofs.overhead.recorder import KERNEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"harness": "the harness", "bare": "bare DeepSpeed", "trainer": "Trainer"}
Cell = dict[str, Any]
_KERNEL_NAMES = {
    "page_faults": "page faults",
    "waits": "switches of a thread that waits",
    "preemptions": "switches of a thread that is sent away",
}


def name_of(cell: Cell) -> str:
    """Return "ZeRO 3, 2 ranks", and the layers where they are not those of most cells."""
    layers = f", {cell['layers']} layers" * (cell["layers"] != LAYERS)
    return f"ZeRO {cell['stage']}, {cell['ranks']} rank{'s' * (cell['ranks'] > 1)}{layers}"


def seconds(cell: Cell, side: str) -> list[float]:
    """Return each start's median step, in seconds."""
    return [statistics.median(round_[side][0]["step_s"]) for round_ in cell["rounds"]]


def spread_rows(cells: Sequence[Cell]) -> Iterator[tuple[str, list[str]]]:
    """Yield rows of (title, a text per cell): percentiles of the ratios of all starts.

    What a ratio of equals looks like is that of each start of bare DeepSpeed to its start before.
    """
    yield "rounds", [f"{len(cell['rounds'])}" for cell in cells]
    for over, under in (("harness", "bare"), ("harness", "trainer")):
        each = [
            [a / b for a, b in zip(seconds(cell, over), seconds(cell, under), strict=True)]
            for cell in cells
        ]
        yield f"{NAMES[over]} / {NAMES[under]}", [_percentiles(ratios) for ratios in each]
    again = [
        [after / before for before, after in pairwise(seconds(cell, "bare"))] for cell in cells
    ]
    yield "bare DeepSpeed / itself, one start before", [_percentiles(ratios) for ratios in again]


def kernel_rows(cells: Sequence[Cell]) -> Iterator[tuple[str, list[str]]]:
    """Yield rows of (title, a text per cell): what the kernel did for rank 0 in a step."""
    for kind in KERNEL:
        for side, name in NAMES.items():
            medians = [
                statistics.median(
                    value for round_ in cell["rounds"] for value in round_[side][0][kind]
                )
                for cell in cells
            ]
            yield f"{_KERNEL_NAMES[kind]}: {name}", [f"{median:,.0f}" for median in medians]


def picture(results: dict[str, Any]) -> Figure:
    """Return a picture in which every start of every side is a point."""
    cells = results["cells"]
    figure = new_figure(7.2, 3.2, "Seconds a step", "a point is one start, the line their median")
    for axis, cell in zip(figure.subplots(1, len(cells), squeeze=False)[0], cells, strict=True):
        for place, side in enumerate(NAMES):
            values = seconds(cell, side)
            # From left to right as they were measured: a drift of the machine is a slope.
            across = [place - 0.3 + 0.6 * n / max(len(values) - 1, 1) for n in range(len(values))]
            axis.plot(across, values, "o", ms=3, alpha=0.7, color=f"C{place}", mew=0)
            median = statistics.median(values)
            axis.plot([place - 0.36, place + 0.36], [median, median], color=f"C{place}")
        axis.set_title(name_of(cell))
        axis.set_xticks(range(len(NAMES)), ["harness", "bare", "Trainer"])
        axis.set_ylim(bottom=0)
    return figure


def _percentiles(ratios: Sequence[float]) -> str:
    if len(ratios) < 2:
        return "-"
    twentieths = statistics.quantiles(ratios, n=20, method="inclusive")
    low, middle, high = twentieths[0], twentieths[9], twentieths[18]
    return f"{low:.2f}, **{middle:.3f}**, {high:.2f}"
