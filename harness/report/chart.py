"""Charts as HTML: lines, bars and heat maps, readable at any width and without JavaScript.

Lines are in an SVG that stretches; all text is HTML beside it, positioned in percent, so that it
keeps its size. A chart over a run is drawn once for each kind of x axis, and CSS shows one.
chart.css has the style, chart.js shows the values under the pointer.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from harness.report.formatting import escaped, short
from harness.report.palette import SERIES

Xs = dict[str, list[float]]
"""For each kind of x axis, the coordinate of every point."""

AXES = {"step": "step", "tokens": "tokens", "hours": "time at work"}
"""Kinds of x axis of a chart over a run."""

STYLE, SCRIPT = (
    Path(__file__).with_name(f"chart.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")
)
"""Style and script of a page with charts."""

_SIDE = 1000  # of the SVG's coordinates
_MOST_DOTS = 80
_BACKGROUND = ("faint", "band")  # not in legends, nor under the pointer


def colour_of(place: int) -> str:
    """Return the CSS colour of run, curve or bar number `place`; grey beyond the palette."""
    return f"var(--series-{place + 1})" if place < len(SERIES) else "var(--muted)"


@dataclass(frozen=True)
class Scale:
    """An axis of numbers, or of `words` one step apart."""

    low: float
    high: float
    log: bool = False
    words: Sequence[str] = ()

    def share(self, value: float) -> float:
        """Return a value's position between the ends, 0 to 1."""
        if self.log:
            return math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int = 5, whole: bool = False) -> list[tuple[float, str]]:
        """Return the ticks: positions from 0 to 1 with their labels."""
        if self.words:
            return [(self.share(place), word) for place, word in enumerate(self.words)]
        numbers = ticks(self.low, self.high, about, whole)
        if self.log:
            first, last = (math.log10(end) for end in (self.low, self.high))
            apart = math.ceil((last - first) / (about + 1))
            powers = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1, apart)
            marked = [10.0**power for power in powers]
            if len(marked) < 2:
                begin = 10.0 ** math.floor(first)
                steps = (begin * times for times in (1, 2, 5, 10, 20, 50))
                marked = [number for number in steps if self.low <= number <= self.high]
            numbers = marked or numbers  # a range of 2.5 to 4 contains no 1, 2 or 5
        return [(self.share(number), short(number)) for number in numbers]


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    colour: str
    """CSS."""
    x: Xs
    y: list[float]
    style: Literal["line", "faint", "dots", "dashed", "band"] = "line"
    """A band is filled: its points go round its edge, and back."""
    last: str = ""
    """The value to show beside the label."""
    width: float = 0
    """Pixels; 0 for the style's."""
    names: Sequence[tuple[str, str]] = ()
    """A name for each point, and the side to write it on: left, right, top or bottom."""
    title: str = ""
    """The text to show while the line is pointed at."""
    run: str = ""
    """Id of its run among several, by which a checkbox hides it: names of runs may be equal."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at a point of the x axis. `is_named`: its label is always shown."""

    x: dict[str, float]
    colour: str
    label: str
    is_named: bool = False


@dataclass(frozen=True)
class Chart:
    """A titled chart of lines; one without points is not drawn."""

    name: str
    """The element's id, of letters and hyphens."""
    title: str
    unit: str
    curves: list[Curve]
    note: str = ""
    """One sentence about what the chart shows."""
    limits: list[tuple[str, float]] = field(default_factory=list)
    """Labelled horizontal lines."""
    marks: list[Mark] = field(default_factory=list)
    axes: dict[str, str] = field(default_factory=lambda: AXES)
    from_zero: bool = False
    is_wide: bool = False
    has_legend: bool = True
    log_x: bool = False
    whole_x: bool = False
    """True if x counts something, so that ticks between whole numbers mean nothing."""
    log_y: bool = False
    x_range: tuple[float, float] | None = None
    x_words: Sequence[str] = ()
    """Categories, one step apart from 0, in place of numbers."""
    y_range: tuple[float, float] | None = None
    height: int = 0
    """Pixels; 0 for the style's."""


@dataclass(frozen=True)
class Heat:
    """A grid of numbers; a stronger colour is a larger number."""

    title: str
    unit: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[float | None]]
    colour: str = "var(--series-1)"
    low_colour: str = "transparent"
    """Colour of 0. A cell's text is white unless this is transparent."""
    digits: int = 2
    most: float = 1
    """The number that is drawn in the full colour."""
    note: str = ""


def line(
    label: str,
    points: Sequence[tuple[float, float]],
    colour: str = "",
    style: Literal["line", "faint", "dots", "dashed"] = "line",
    **more: Any,
) -> Curve:
    """Return a curve over a single x axis; `colour` is a name of the palette."""
    xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
    return Curve(label, f"var(--{colour})" if colour else "", {"x": xs}, ys, style, **more)


def lines(title: str, curves: Sequence[Curve], x: str = "", unit: str = "", **more: Any) -> Chart:
    """Return a chart over a single x axis, whose name is `x`; curves without a colour get one."""
    coloured = [
        replace(curve, colour=curve.colour or colour_of(place))
        for place, curve in enumerate(curves)
    ]
    more.setdefault("has_legend", len(curves) > 1)
    return Chart("", title, unit, coloured, axes={"x": x}, **more)


def html_of(chart: Chart | Heat) -> str:
    """Return a chart as a <figure>; "" without points."""
    if isinstance(chart, Heat):
        return figure_of(chart.title, chart.unit, _table(chart), notes=_notes(chart.note))
    curves = [curve for curve in chart.curves if curve.y]
    if not curves:
        return ""
    y, above = _y_scale(chart, curves)
    body = "".join(_for_axis(chart, curves, axis, y) for axis in chart.axes)
    legend = [
        (curve.label, curve.colour, curve.style, curve.last)
        for curve in curves
        if chart.has_legend and curve.label and curve.style not in _BACKGROUND
    ]
    return figure_of(
        *(chart.title, chart.unit, plot_of(y, body, chart.limits), legend_of(legend)),
        _notes(chart.note, above), name=chart.name, height=chart.height, is_wide=chart.is_wide,
        values=data_of(chart),
    )  # fmt: skip


def strip(parts: Mapping[str, float], colours: Mapping[str, str], texts: Mapping[str, str]) -> str:
    """Return one bar of parts from left to right, to scale, and a legend with a text for each."""
    total = sum(parts.values()) or 1.0
    bar = "".join(piece(size / total, colours[name], name) for name, size in parts.items())
    legend = [(name, colours[name], "", texts[name]) for name in parts]
    return f"<div class='bar tall'>{bar}</div>{legend_of(legend, 'blocks')}"


def piece(share: float, colour: str, title: str) -> str:
    """Return a part of a bar from left to right."""
    return f'<i style="width:{100 * share:.2f}%;background:{colour}" title="{escaped(title)}"></i>'


def figure_of(
    title: str, unit: str, plot: str, legend: str = "", notes: str = "", *, name: str = "",
    height: int = 0, is_wide: bool = False, values: object = None,
) -> str:  # fmt: skip
    """Return the frame of a chart; `values` are what chart.js shows under the pointer."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False) if values else ""
    data = f' data-values="{escaped(text)}"' if text else ""
    return (
        f"<figure class='chart{' wide' * is_wide}'"
        f"{f' id=chart-{name}' if name else ''}{f' style=--h:{height}px' if height else ''} "
        f'tabindex=0 aria-label="{escaped(title)}, {escaped(unit)}"{data}>'
        f"<figcaption><h3>{escaped(title)}</h3><span>{escaped(unit)}</span></figcaption>"
        f"{legend}{plot}{notes}</figure>"
    )


def _notes(*notes: str) -> str:
    return "".join(f"<p class=note>{escaped(note)}</p>" for note in notes if note)


def plot_of(y: Scale, body: str, limits: Iterable[tuple[str, float]]) -> str:
    """Return the y axis, `body` beside it, and the limits drawn over that."""
    labels = "".join(
        f'<span style="bottom:{100 * share:.2f}%">{text}</span>' for share, text in y.ticks()
    )
    limits = [(label, value) for label, value in limits if y.low <= value <= y.high]
    room = max((len(label) for label, _ in limits), default=0)  # beside the curves, not over them
    drawn = "".join(
        f'<b class=limit style="bottom:{100 * y.share(value):.2f}%">{escaped(label)}</b>'
        f'<u style="bottom:{100 * y.share(value):.2f}%"></u>'
        for label, value in limits
    )
    return (
        f"<div class=plot style=--room:{room}ch><div class=y>{labels}</div>"
        f"<div class=area>{body}<div class=limits>{drawn}</div></div></div>"
    )


def data_of(chart: Chart) -> dict[str, Any]:
    """Return the values that chart.js shows under the pointer."""
    curves = [curve for curve in chart.curves if curve.y and curve.style not in _BACKGROUND]
    scales = {axis: _x_scale(chart, curves or chart.curves, axis) for axis in chart.axes}
    return {
        "axes": chart.axes,
        "log": chart.log_x,
        "curves": [
            {
                "label": curve.label,
                "run": curve.run,
                "colour": curve.colour,
                "x": {axis: [rounded(x) for x in xs] for axis, xs in curve.x.items()},
                "y": [rounded(y) for y in curve.y],
            }
            for curve in curves
        ],
        "ranges": {axis: (scale.low, scale.high) for axis, scale in scales.items()},
    }


def legend_of(items: Sequence[tuple[str, str, str, str]], kind: str = "") -> str:
    """Return the legend of (label, colour, style, value)."""
    listed = "".join(
        f'<li style="--c:{colour}" class="{style}">{escaped(label)}'
        f"{f' <b>{escaped(last)}</b>' if last else ''}</li>"
        for label, colour, style, last in items
    )
    return f"<ul class='legend {kind}'>{listed}</ul>" if items else ""


def _for_axis(chart: Chart, curves: list[Curve], axis: str, y: Scale) -> str:
    """Return lines and x labels of one kind of x axis."""
    x = _x_scale(chart, curves, axis)
    drawn = grid_of(y)
    marks = [m for m in chart.marks if axis in m.x and x.low <= m.x[axis] <= x.high]
    for mark in marks:
        at = f"{_SIDE * x.share(mark.x[axis]):.1f}"
        title = f"<title>{escaped(mark.label)}</title>"
        drawn += f'<path class=mark style="stroke:{mark.colour}" d="M{at} 0V{_SIDE}">{title}</path>'
    words = "".join(
        f'<b class=mark style="left:{at:.2f}%;transform:translateX(-{at:.2f}%);'
        f'color:{mark.colour}">{escaped(mark.label)}</b>'
        for mark in marks
        for at in (100 * x.share(mark.x[axis]),)
        if mark.is_named
    )
    for curve in curves:
        points = [
            (x.share(at), y.share(min(max(value, y.low), y.high)))
            for at, value in zip(curve.x[axis], curve.y, strict=True)
        ]
        drawn += _curve(curve, points)
        words += "".join(
            f'<b class="name {side}" style="left:{100 * a:.2f}%;bottom:{100 * b:.2f}%">'
            f"{escaped(name)}</b>"
            for (a, b), (name, side) in zip(points, curve.names, strict=False)
        )
    kind = f" class=on-{axis}" if len(chart.axes) > 1 else ""
    words = f"<div class=limits>{words}</div>" if words else ""
    labels = labels_of(_x_ticks(chart, axis, x))
    name = f"<div class=axis>{escaped(chart.axes[axis])}</div>"
    return f"<div{kind}>{svg_of(drawn)}{words}{labels}{name}</div>"


def svg_of(drawn: str) -> str:
    """Return paths as a picture that stretches."""
    size = f'viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio=none'
    return f"<svg {size} aria-hidden=true>{drawn}</svg>"


def grid_of(y: Scale) -> str:
    """Return a horizontal line for each tick."""
    return "".join(
        f'<path class=grid d="M0 {_SIDE * (1 - share):.1f}H{_SIDE}"/>' for share, _ in y.ticks()
    )


def labels_of(labels: Iterable[tuple[float, str]], kind: str = "") -> str:
    """Return the labels of an x axis, at places from 0 to 1."""
    spans = "".join(
        f'<span style="left:{100 * share:.2f}%"'
        f"{' class=last' if share > 0.97 and not kind else ''}>{escaped(text)}</span>"
        for share, text in labels
    )
    return f"<div class='x {kind}'>{spans}</div>"


def _curve(curve: Curve, points: Sequence[tuple[float, float]]) -> str:
    """Return a line, and dots where points are few enough to be told apart."""
    width = f";stroke-width:{curve.width:g}" if curve.width else ""
    shape = f'style="{"fill" if curve.style == "band" else "stroke"}:{curve.colour}{width}"'
    if curve.run:
        shape += f' data-run="{escaped(curve.run)}"'
    places = [f"{_SIDE * x:.1f} {_SIDE * (1 - y):.1f}" for x, y in points]
    title = f"<title>{escaped(curve.title)}</title>" if curve.title else ""
    drawn = ""
    if len(points) > 1 and not curve.names:
        drawn = f'<path class={curve.style} {shape} d="M{"L".join(places)}">{title}</path>'
    if len(points) == 1 or (curve.style == "dots" and len(points) <= _MOST_DOTS):
        dots = "".join(f"M{place}h.01" for place in places)  # the round caps of tiny lines
        drawn += f'<path class=dot {shape} d="{dots}">{title}</path>'
    return drawn


def _table(heat: Heat) -> str:
    head = "".join(f"<th>{escaped(name)}</th>" for name in heat.columns)

    def cell(value: float | None) -> str:
        if value is None:
            return "<td></td>"
        share = round(100 * min(max(value / heat.most, 0.0), 1.0))
        colour = f"color-mix(in srgb,{heat.colour} {share}%,{heat.low_colour})"
        ink = "" if heat.low_colour == "transparent" else ";color:#fff"
        return f'<td style="background:{colour}{ink}">{value:.{heat.digits}f}</td>'

    rows = "".join(
        f"<tr><th>{escaped(name)}</th>{''.join(map(cell, row))}</tr>"
        for name, row in zip(heat.rows, heat.cells, strict=True)
    )
    return f"<div class=capped><table class=heat><tr><th></th>{head}</tr>{rows}</table></div>"


def _y_scale(chart: Chart, curves: list[Curve]) -> tuple[Scale, str]:
    """Return the y axis, and a sentence on values above it.

    A few values far above all others would flatten the rest, so they are cut off, and the sentence
    names the highest.
    """
    if chart.y_range:
        return Scale(*chart.y_range, chart.log_y), ""
    values = sorted(y for curve in curves for y in curve.y)
    if chart.log_y:
        return Scale(max(values[0], 1e-300) / 1.3, values[-1] * 1.3, True), ""
    low, high, above = values[0], values[-1], ""
    usual = values[int(0.98 * (len(values) - 1))]
    if len(values) >= 50 and high - low > 4 * (usual - low) > 0:
        high = usual + 0.3 * (usual - low)
        above = f"The highest value, {short(values[-1])}, lies above the chart."
    near = [value for _, value in chart.limits if low - (high - low) <= value]
    limits = [value for value in near if value <= high + (high - low)]
    low, high = min([low, *limits]), max([high, *limits])
    if chart.from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high == low:
        low, high = low - (abs(low) or 1) * 0.5, high + (abs(high) or 1) * 0.5
    room = 0.05 * (high - low)
    return Scale(low if chart.from_zero and low == 0 else low - room, high + room), above


def _x_scale(chart: Chart, curves: Iterable[Curve], axis: str) -> Scale:
    if chart.x_words:
        return Scale(-0.5, len(chart.x_words) - 0.5, words=chart.x_words)
    if chart.x_range:
        return Scale(*chart.x_range, chart.log_x)
    places = [x for curve in curves if curve.x[axis] for x in (curve.x[axis][0], curve.x[axis][-1])]
    begin, end = min(places, default=0.0), max(places, default=1.0)
    return Scale(*((begin, end) if end > begin else (begin - 0.5, begin + 0.5)), chart.log_x)


def _x_ticks(chart: Chart, axis: str, x: Scale) -> list[tuple[float, str]]:
    if axis == "hours":
        unit, per = next(
            (unit, per)
            for unit, per in (("h", 3600), ("min", 60), ("s", 1))
            if x.high >= 2 * per or per == 1
        )
        places = ticks(x.low / per, x.high / per)
        return [(x.share(place * per), f"{short(place)} {unit}") for place in places]
    labels = x.ticks(whole=chart.whole_x or axis in AXES)
    if chart.x_range:  # its ends get a label even if they are not round numbers
        inner = [label for label in labels if 0.07 < label[0] < 0.93]
        labels = [(0.0, short(x.low, 4)), *inner, (1.0, short(x.high, 4))]
    return labels


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


def rounded(value: float) -> float:
    """Return a number rounded to six digits, or to an integer if it is one."""
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")
