"""Plots estimates: bars per phase and ZeRO stage, and sweeps as heat maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.estimate.fit import with_stage
from harness.estimate.memory_item import GIB, PHASES
from harness.estimate.timeline import Estimate, estimate_memory
from harness.report.charts import grouped
from harness.report.palette import COMPONENTS, INK, MUTED, VERDICTS
from tools.figure import limit_line, new_figure
from tools.memory.sweep import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES = {
    "backward_first": "backward begins",
    "backward_last": "backward ends",
    "gradients_ready": "gradients ready",
    "between_steps": "between steps",
}
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


def estimate_drawn(estimate: Estimate, title: str, subtitle: str) -> Figure:
    """Return the figure of an estimate, sizes in GiB."""
    figure = new_figure(11.5, 5, title, subtitle)
    phases, stages = figure.subplots(1, 2, width_ratios=(7, 2))
    worst = estimate.worst
    _bars(phases, {_PHASES.get(name, name): worst.phase(name) for name in PHASES})
    phases.set_title(f"Rank {worst.rank}, phase by phase")
    by_stage = {}
    for stage in range(4 if estimate.inputs.bounds is None else 2):
        other = estimate_memory(with_stage(estimate.inputs, stage)).worst
        by_stage[f"ZeRO {stage}"] = other.phase(other.peak_phase)
    _bars(stages, by_stage)
    stages.set_title("Peak of each ZeRO stage")
    for axis in (phases, stages):
        _device_line(axis, estimate.device_bytes, at_end=axis is stages)
        axis.set_ylabel("GiB")
    phases.legend(loc="upper right", ncols=len(COMPONENTS), fontsize=8, columnspacing=1.2)
    return figure


def _bars(axis: Axes, sizes: dict[str, dict[str, int]]) -> None:
    """Draw stacked bars, each labelled with its total."""
    groups = {name: grouped(parts) for name, parts in sizes.items()}
    places = range(len(groups))
    bottoms = [0.0] * len(groups)
    for component, colour in COMPONENTS.items():
        heights = [parts[component] / GIB for parts in groups.values()]
        axis.bar(
            places, heights, 0.74, bottoms, color=colour.light, label=component, ec="white", lw=0.6
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, total in zip(places, bottoms, strict=True):
        text = axis.annotate(
            f"{total:,.1f}" if total >= 1 else f"{total:.2f}",
            (place, total),
            (0, 3),
            textcoords="offset points",
            ha="center",
        )
        text.set_in_layout(False)
    axis.set_xticks(places, list(groups), rotation=35, ha="right")
    axis.set_ylim(0, max(bottoms) * 1.22)


def _device_line(axis: Axes, device_bytes: int | None, at_end: bool = False) -> None:
    if device_bytes:
        label = f"{device_bytes / GIB:,.0f} GiB of the GPU"
        limit_line(axis, device_bytes / GIB, label, at_end)


def sweep_drawn(points: list[Point], title: str, subtitle: str) -> Figure:
    """Return the heat map of a sweep over up to three ranges: columns, rows and panels."""
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
