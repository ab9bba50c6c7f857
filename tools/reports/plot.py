"""Plots one run, or several in the same axes."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from harness.report.chart import Chart, Curve
from harness.report.charts import charts
from harness.report.compare import MOST_DRAWN, ranked
from harness.report.formatting import count, short
from harness.report.page import described
from harness.report.palette import FAINT, MUTED, SERIES
from harness.report.run_record import RunRecord
from tools.figure import new_figure, with_thousands

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BESIDE = ("learning-rate", "grad-norm", "mfu", "perplexity", "tokens-per-s")
"""Charts for the row below the loss; the first three with values are drawn."""


def drawn(runs: list[RunRecord]) -> Figure:
    """Return a figure with a large loss chart, and three small charts below it."""
    runs = ranked(runs)[:MOST_DRAWN]
    by_name = {chart.name: chart for chart in charts(runs)}
    figure = new_figure(9.5, 5.6, *_titles(runs))
    upper, lower = figure.subfigures(2, 1, height_ratios=(5, 3))
    loss = upper.subplots(1, 1 if len(runs) == 1 else 2, squeeze=False)[0]
    _draw(loss[0], by_name["loss"])
    if len(runs) > 1:
        _draw(loss[1], by_name["held-out"])
        loss[1].legend(loc="upper right", ncols=1 + len(runs) // 12, fontsize=8)
    drawable = [by_name[name] for name in _BESIDE if name in by_name]
    beside: list[Chart | None] = [c for c in drawable if any(curve.y for curve in c.curves)]
    for axis, chart in zip(lower.subplots(1, 3), [*beside, None, None, None], strict=False):
        if chart is None:
            axis.set_axis_off()
        else:
            _draw(axis, chart)
    return figure


def _titles(runs: list[RunRecord]) -> tuple[str, str]:
    """Return the title (model and cluster) and the subtitle (results)."""
    (first, *others), best = runs, runs[0].best()
    held_out = f"held-out loss {best[1]:.2f} nats per token" if best else "not evaluated"
    if others:
        title = f"{len(runs)} runs of {described(first)}"
        if (sets := len({run.held_out_set for run in runs})) > 1:
            return title, f"{sets} held-out sets, whose losses cannot be compared"
        return title, f"best: {first.name}, {held_out}"
    tokens = f", {short(first.tokens_at(first.lines[-1]))} tokens" if first.lines else ""
    return described(first), f"{count(first.step)} steps{tokens}: {held_out}"


def _draw(axis: Axes, chart: Chart) -> None:
    for curve in chart.curves:
        if curve.y:
            _draw_curve(axis, curve, chart)
    shown = [value for curve in chart.curves for value in curve.y]
    for label, value in chart.limits:
        if shown and value <= max(shown):
            axis.axhline(value, color=MUTED.light, ls=(0, (4, 3)), lw=1)
            axis.annotate(
                label,
                (0, value),
                (3, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=MUTED.light,
            )
    for mark in chart.marks:
        axis.axvline(mark.x["step"], color=FAINT.light, lw=0.7, zorder=0)
    axis.set_title(chart.title)
    axis.set_title(chart.unit, loc="right", fontsize=8, fontweight="normal", color=MUTED.light)
    axis.set_xlabel("step")
    with_thousands(axis.xaxis)
    if len(shown) > 20 and chart.from_zero:
        axis.set_ylim(bottom=0, top=max(1.15 * sorted(shown)[int(0.99 * len(shown))], 1e-12))
        if median(shown) >= 1000:
            with_thousands(axis.yaxis)


def _draw_curve(axis: Axes, curve: Curve, chart: Chart) -> None:
    place = curve.colour.removeprefix("var(--series-").removesuffix(")")
    colour = SERIES[int(place) - 1].light if place.isdecimal() else MUTED.light
    faint = curve.style == "faint"
    axis.plot(
        curve.x["step"],
        curve.y,
        color=colour,
        lw=0.8 if faint else 1.8,
        alpha=0.35 if faint else 1,
        ls=":" if curve.style == "dashed" else "-",
        marker="o" if curve.style == "dots" and len(curve.y) <= 60 else "",
        ms=4.5,
        label=None if faint else f"{curve.label} {curve.last}",
    )
    if faint or not chart.has_legend:
        return
    axis.annotate(
        f"{curve.label} {curve.last}",
        (curve.x["step"][-1], curve.y[-1]),
        (6, 0),
        textcoords="offset points",
        color=colour,
        va="center",
        annotation_clip=False,
    )
