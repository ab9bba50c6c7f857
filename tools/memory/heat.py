"""A sweep as pictures: a heat map, the peak against micro-batch and length."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from harness.estimate.fit import with_micro_batch
from harness.estimate.held import GIB
from harness.estimate.inputs import Inputs
from harness.estimate.timeline import Estimate, estimate_memory
from tools.figure import new_figure
from tools.look.palette import INK, MUTED, VERDICTS
from tools.memory.sweep import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 7  # each twice the one before
_SHORTEST = 512  # tokens

Curve = list[tuple[int, int]]
"""(micro-batch or tokens, bytes at the peak)."""


def by_micro_batch(estimate: Estimate) -> Curve:
    """Peaks for 1, 2, 4, ... samples at once, and the run's own."""
    inputs = estimate.inputs
    values = {2**power for power in range(_POINTS)} | {inputs.micro_batch}
    return [(n, _peak(with_micro_batch(inputs, n))) for n in sorted(values)]


def by_seq_len(estimate: Estimate) -> Curve:
    """Peaks for 512, 1,024, ... tokens, and the run's own length."""
    inputs = estimate.inputs
    values = {_SHORTEST * 2**power for power in range(_POINTS)} | {inputs.seq_len}
    whole = (n for n in sorted(values) if n % inputs.grid.sequence == 0)
    return [(n, _peak(replace(inputs, seq_len=n))) for n in whole]


def _peak(inputs: Inputs) -> int:
    return estimate_memory(inputs).worst.peak


_NAMES = {
    "micro_batch": "samples in a micro-batch",
    "seq_len": "tokens in a sample",
    "gpus": "GPUs",
}
_COLOURS = {
    "fits": (VERDICTS["good"].light, 0.22),
    "tight": (VERDICTS["warning"].light, 0.28),
    "does not fit": (VERDICTS["bad"].light, 0.22),
}


def drawn(points: list[Point], title: str, subtitle: str) -> Figure:
    """A panel for each value of a third range; a row, a column for each value of the others."""
    ranges = {name: sorted({point.values[name] for point in points}) for name in points[0].values}
    across, *others = sorted(ranges, key=lambda name: -len(ranges[name]))
    down = others[0] if others else None
    panels = ranges[others[1]] if len(others) > 1 else [None]
    rows = len(ranges[down]) if down else 1
    width = max(5.5, 1.1 + 0.95 * len(ranges[across]))
    height = 1.7 + (0.5 * rows + 0.8) * len(panels)
    figure = new_figure(width, height, title, f"{subtitle}: GiB in tensors, fullest rank")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        shown = [point for point in points if panel is None or point.values[others[1]] == panel]
        _panel(axis, shown, ranges, across, down)
        if panel is not None:
            axis.set_title(f"{panel:,} {_NAMES[others[1]]}")
    _legend(figure, points)
    return figure


def _panel(
    axis: Axes, points: list[Point], ranges: dict[str, list[int]], across: str, down: str | None
) -> None:
    from matplotlib.patches import Rectangle

    most = max(point.estimate.worst.peak for point in points)
    for point in points:
        x = ranges[across].index(point.values[across])
        y = ranges[down].index(point.values[down]) if down else 0
        size = point.estimate.worst.peak
        fill, alpha = _COLOURS.get(point.estimate.verdict, (MUTED.light, 0.1 + 0.4 * size / most))
        axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fc=fill, alpha=alpha, ec="none"))
        axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fc="none", ec="white", lw=2))
        axis.text(x, y, f"{size / GIB:,.1f}", ha="center", va="center", color=INK.light)
    axis.set_xlim(-0.5, len(ranges[across]) - 0.5)
    axis.set_ylim(-0.5, (len(ranges[down]) if down else 1) - 0.5)
    axis.set_xticks(range(len(ranges[across])), [f"{value:,}" for value in ranges[across]])
    axis.set_xlabel(_NAMES[across])
    if down:
        axis.set_yticks(range(len(ranges[down])), [f"{value:,}" for value in ranges[down]])
        axis.set_ylabel(_NAMES[down])
    else:
        axis.set_yticks([])
    axis.grid(visible=False)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _legend(figure: Figure, points: list[Point]) -> None:
    from matplotlib.patches import Patch

    verdicts = [name for name in _COLOURS if any(p.estimate.verdict == name for p in points)]
    patches = [
        Patch(fc=_COLOURS[name][0], alpha=_COLOURS[name][1], label=name) for name in verdicts
    ]
    if patches:
        figure.legend(handles=patches, loc="outside lower left", ncols=len(patches))
