"""Line charts as HTML and SVG, readable at any width and without JavaScript.

The lines are in an SVG that stretches; all text is HTML beside it, placed in per cent, so that it
keeps its size. A chart over the run is drawn once for each kind of x axis, and CSS shows one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.report.words import duration, escaped, short

Xs = dict[str, list[float]]
"""For each kind of x axis, the place of every point."""

AXES = {"step": "step", "tokens": "tokens", "hours": "time at work"}
"""Kinds of x axis of a chart over a run."""

_SIDE = 1000  # of the SVG's coordinates
_MOST_DOTS = 80


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    colour: str
    """CSS."""
    x: Xs
    y: list[float]
    style: Literal["line", "faint", "dots", "dashed"] = "line"
    last: str = ""
    """The value to show beside the label."""


@dataclass(frozen=True)
class Mark:
    """A moment on the x axis."""

    x: dict[str, float]
    colour: str
    label: str


@dataclass(frozen=True)
class Chart:
    """A titled chart; one without a point is not drawn."""

    name: str
    """Of letters and hyphens: the element's id."""
    title: str
    unit: str
    curves: list[Curve]
    note: str = ""
    """One sentence on what is seen."""
    limits: list[tuple[str, float]] = field(default_factory=list)
    """Labelled horizontal lines."""
    marks: list[Mark] = field(default_factory=list)
    axes: dict[str, str] = field(default_factory=lambda: AXES)
    from_zero: bool = False
    is_wide: bool = False
    has_legend: bool = True


def html_of(chart: Chart) -> str:
    """Return a chart as a <figure>; "" without a point."""
    curves = [curve for curve in chart.curves if curve.y]
    if not curves:
        return ""
    low, high, above = _range(chart, curves)
    body = "".join(_for_axis(chart, curves, axis, low, high) for axis in chart.axes)
    y_labels = "".join(
        f'<span style="bottom:{_percent(value, low, high):.2f}%">{short(value)}</span>'
        for value in ticks(low, high)
    )
    limits = "".join(
        f'<b class=limit style="bottom:{_percent(value, low, high):.2f}%">{escaped(label)}</b>'
        for label, value in chart.limits
        if low <= value <= high
    )
    note = f"<p class=note>{escaped(chart.note)}</p>" if chart.note else ""
    note += f"<p class=note>{escaped(above)}</p>" if above else ""
    wide = " wide" if chart.is_wide else ""
    return (
        f'<figure class="chart{wide}" id="chart-{chart.name}" tabindex=0 '
        f'aria-label="{escaped(chart.title)}, {escaped(chart.unit)}">'
        f"<figcaption><h3>{escaped(chart.title)}</h3><span>{escaped(chart.unit)}</span></figcaption>"
        f"{_legend(curves) if chart.has_legend else ''}"
        f"<div class=plot><div class=y>{y_labels}</div><div class=area>{body}"
        f"<div class=limits>{limits}</div></div></div>"
        f"{note}</figure>"
    )


def data_of(chart: Chart) -> dict[str, Any]:
    """Return the values that the page's script shows under the pointer."""
    curves = [curve for curve in chart.curves if curve.y and curve.style != "faint"]
    return {
        "axes": chart.axes,
        "curves": [
            {
                "label": curve.label,
                "colour": curve.colour,
                "x": {axis: [_rounded(x) for x in xs] for axis, xs in curve.x.items()},
                "y": [_rounded(y) for y in curve.y],
            }
            for curve in curves
        ],
        "ranges": {axis: _x_range(curves or chart.curves, axis) for axis in chart.axes},
    }


def _legend(curves: list[Curve]) -> str:
    shown = [curve for curve in curves if curve.label and curve.style != "faint"]
    items = "".join(
        f'<li style="--c:{curve.colour}" class={curve.style}>{escaped(curve.label)}'
        f"{f' <b>{escaped(curve.last)}</b>' if curve.last else ''}</li>"
        for curve in shown
    )
    return f"<ul class=legend>{items}</ul>" if items else ""


def _for_axis(chart: Chart, curves: list[Curve], axis: str, low: float, high: float) -> str:
    """Return lines and x labels of one kind of x axis."""
    begin, end = _x_range(curves, axis)
    lines = "".join(
        f'<path class=grid d="M0 {y:.1f}H{_SIDE}"/>'
        for y in (_y(value, low, high) for value in ticks(low, high))
    )
    lines += "".join(
        f'<path class=limit d="M0 {_y(value, low, high):.1f}H{_SIDE}"/>'
        for _, value in chart.limits
        if low <= value <= high
    )
    lines += "".join(
        f'<path class=mark style="stroke:{mark.colour}" '
        f'd="M{_x(mark.x[axis], begin, end):.1f} 0V{_SIDE}">'
        f"<title>{escaped(mark.label)}</title></path>"
        for mark in chart.marks
        if axis in mark.x and begin <= mark.x[axis] <= end
    )
    for curve in curves:
        points = [
            (_x(x, begin, end), _y(min(max(y, low), high), low, high))
            for x, y in zip(curve.x[axis], curve.y, strict=True)
        ]
        shape = f'style="stroke:{curve.colour}" data-curve="{escaped(curve.label)}"'
        lines += f'<path class={curve.style} {shape} d="{_line(points)}"/>'
        if len(points) == 1 or (curve.style == "dots" and len(points) <= _MOST_DOTS):
            dots = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in points)  # of a line's round caps
            lines += f'<path class=dot {shape} d="{dots}"/>'
    label = chart.axes[axis]
    ticked = _x_ticks(axis, begin, end)
    x_labels = "".join(
        f'<span style="left:{_percent(value, begin, end):.2f}%">{text}</span>'
        for value, text in ticked
    )
    kind = f"on-{axis}" if axis in AXES else "always"
    return (
        f"<div class={kind}>"
        f'<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio=none aria-hidden=true>'
        f"{lines}</svg>"
        f"<div class=x>{x_labels}</div><div class=axis>{escaped(label)}</div></div>"
    )


def _line(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _range(chart: Chart, curves: list[Curve]) -> tuple[float, float, str]:
    """Return the y axis, and a sentence on values above it.

    A few values far above all others would press the rest flat: they are cut off, and named.
    """
    values = sorted(y for curve in curves for y in curve.y)
    low, high, above = values[0], values[-1], ""
    usual = values[int(0.98 * (len(values) - 1))]
    if len(values) >= 50 and high - low > 4 * (usual - low) > 0:
        high = usual + 0.3 * (usual - low)
        above = f"The highest value, {short(values[-1])}, is above the picture."
    near = [value for _, value in chart.limits if low - (high - low) <= value]
    limits = [value for value in near if value <= high + (high - low)]
    low, high = min([low, *limits]), max([high, *limits])
    if chart.from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high == low:
        low, high = low - (abs(low) or 1) * 0.5, high + (abs(high) or 1) * 0.5
    room = 0.05 * (high - low)
    return (low if chart.from_zero and low == 0 else low - room), high + room, above


def _x_range(curves: Iterable[Curve], axis: str) -> tuple[float, float]:
    places = [x for curve in curves if curve.x[axis] for x in (curve.x[axis][0], curve.x[axis][-1])]
    begin, end = min(places, default=0.0), max(places, default=1.0)
    return (begin, end) if end > begin else (begin - 0.5, begin + 0.5)


def _x_ticks(axis: str, begin: float, end: float) -> list[tuple[float, str]]:
    if axis != "hours":
        return [(x, short(x)) for x in ticks(begin, end, whole=True)]
    unit, per = next(
        (unit, per)
        for unit, per in (("h", 3600), ("min", 60), ("s", 1))
        if end >= 2 * per or per == 1
    )
    return [(x * per, f"{short(x)} {unit}") for x in ticks(begin / per, end / per)]


def ticks(low: float, high: float, about: int = 5, whole: bool = False) -> list[float]:
    """Return round values between two others: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    if not rough > 0 or not math.isfinite(rough):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999)
    if whole:
        step = max(step, 1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, min(last, first + 20) + 1)]


def reduced(values: Sequence[float], most: int) -> list[int]:
    """Return the places of at most about `most` values that draw the same line.

    Of each of equally long pieces, the first, the lowest and the highest.
    """
    if len(values) <= most:
        return list(range(len(values)))
    pieces = max(1, most // 3)
    chosen = {0, len(values) - 1}
    for piece in range(pieces):
        begin, end = (len(values) * number // pieces for number in (piece, piece + 1))
        here = range(begin, end)
        chosen |= {begin, min(here, key=values.__getitem__), max(here, key=values.__getitem__)}
    return sorted(chosen)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return means over up to `window` values around each."""
    half, sums, total = window // 2, [0.0], 0.0
    for value in values:
        total += value
        sums.append(total)
    means = []
    for at in range(len(values)):
        # Symmetrical, so that a slope stays one; near the ends at least half of it, one-sided.
        reach = max(min(half, at, len(values) - 1 - at), half // 2)
        first, last = max(0, at - reach), min(len(values), at + reach + 1)
        means.append((sums[last] - sums[first]) / (last - first))
    return means


def shown_x(axis: str, value: float) -> str:
    """Return a place on an x axis as text."""
    return duration(value) if axis == "hours" else short(value)


def _rounded(value: float) -> float:
    """Return a number with six digits: enough to read, and short."""
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")


def _percent(value: float, low: float, high: float) -> float:
    return 100 * (value - low) / (high - low)


def _x(value: float, begin: float, end: float) -> float:
    return _SIDE * (value - begin) / (end - begin)


def _y(value: float, low: float, high: float) -> float:
    return _SIDE * (high - value) / (high - low)
