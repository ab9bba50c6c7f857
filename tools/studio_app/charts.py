"""ECharts options in the palette's colours; the SVG renderer resolves them for light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tools.look.palette import SERIES

Scale = Literal["value", "log", "category"]


@dataclass(frozen=True)
class Line:
    """A curve, or points without a line between them."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str | None = None
    """A name of the palette; None for the next of SERIES."""
    dashed: bool = False
    dots: bool = False
    """Points alone."""
    width: float = 2
    """Pixels; where curves coincide, the first should be the widest."""


@dataclass(frozen=True)
class Axis:
    """One axis of a chart."""

    name: str
    scale: Scale = "value"
    low: float | None = None
    high: float | None = None
    ends: bool = False
    """The last label is shown, though it may be no round number."""


def series_colour(place: int) -> str:
    """Return the name of the colour of the curve at a place from 0; grey beyond the last."""
    return f"series-{place + 1}" if place < len(SERIES) else "muted"


def lines(
    curves: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    limits: Mapping[str, float] | None = None,
    marks: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return curves over one x axis; `limits` are horizontal lines with their labels, `marks`
    upright ones.
    """
    series: list[dict[str, Any]] = []
    for place, curve in enumerate(curves):
        named = curve.colour or series_colour(place)
        colour = f"var(--{named})"
        series.append(
            {
                "name": curve.name,
                "legend": named,
                "type": "scatter" if curve.dots else "line",
                "data": [[_short(a), _short(b)] for a, b in curve.points],
                "showSymbol": len(curve.points) == 1,
                "symbolSize": 7,
                "lineStyle": {"width": curve.width, "type": "dashed" if curve.dashed else "solid"},
                "itemStyle": {"color": colour},
                "color": colour,
                "emphasis": {"disabled": True},
            }
        )
        series[-1]["lineStyle"]["color"] = colour
    if series and (limits or marks):
        series[0]["markLine"] = _limits(limits or {}, marks or {})
    if series and limits and y.high is None:  # else a line above all points is not drawn
        tops = [value for curve in curves for _, value in curve.points]
        y = replace(y, high=_short(1.06 * max(*tops, *limits.values())))
    return {**_base(x.name), **_axes(x, y), "series": series}


def stacked(
    categories: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    y: Axis,
    *,
    colours: Mapping[str, str] | None = None,
    limits: Mapping[str, float] | None = None,
    together: bool = True,
) -> dict[str, Any]:
    """Return bars for each category; `together` puts the parts on top of each other."""
    series: list[dict[str, Any]] = [
        {
            "name": name,
            "legend": (named := (colours or {}).get(name) or series_colour(place)),
            "type": "bar",
            "data": [_short(size) for size in sizes],
            "itemStyle": {
                "color": f"var(--{named})",
                "borderColor": "var(--surface)",
                "borderWidth": 1,
            },
            "emphasis": {"disabled": True},
            "barMaxWidth": 46,
            **({"stack": "all"} if together else {}),
        }
        for place, (name, sizes) in enumerate(parts.items())
    ]
    if series and limits:
        series[0]["markLine"] = _limits(limits)
    if limits and y.high is None:  # else a line above all bars is not drawn
        tops = [
            sum(sizes) if together else max(sizes) for sizes in zip(*parts.values(), strict=True)
        ]
        y = replace(y, high=_short(1.06 * max(*tops, *limits.values())))
    axes = _axes(Axis("", "category"), y)
    axes["xAxis"]["data"] = list(categories)
    axes["xAxis"]["axisLabel"] |= {
        "interval": "auto" if len(categories) > 12 else 0,
        "rotate": 55 if sum(map(len, categories)) > 60 else 0,
    }
    return {**_base(), **axes, "series": series}


def heat(
    columns: Sequence[str],
    rows: Sequence[str],
    cells: Sequence[Sequence[float]],
    *,
    x_name: str = "",
    y_name: str = "",
    colour: str = "series-1",
) -> dict[str, Any]:
    """Return a grid of cells, darker where the value is larger; each shows its number."""
    most = max((value for row in cells for value in row), default=0) or 1
    data = [
        {
            "value": [column, row, _short(value)],
            # Mixed, not transparent: the number would be, too.
            "itemStyle": {
                "color": f"color-mix(in srgb, var(--{colour}) {value / most:.1%}, transparent)"
            },
        }
        for row, line in enumerate(cells)
        for column, value in enumerate(line)
    ]
    axes = _axes(Axis(x_name, "category"), Axis(y_name, "category"))
    axes["xAxis"]["data"], axes["yAxis"]["data"] = list(columns), list(rows)
    return {
        **_base(x_name),
        **axes,
        "tooltip": {**_TOOLTIP, "trigger": "item"},
        "series": [
            {
                "type": "heatmap",
                "data": data,
                "label": {"show": True, "color": "var(--ink)", "fontSize": 11},
                "emphasis": {"disabled": True},
            }
        ],
    }


_TOOLTIP = {
    "trigger": "axis",
    "confine": True,
    "backgroundColor": "var(--surface)",
    "borderColor": "var(--faint)",
    "textStyle": {"color": "var(--ink)", "fontSize": 12},
    "axisPointer": {"lineStyle": {"color": "var(--faint)"}, "shadowStyle": {"opacity": 0.1}},
}


def _base(x_name: str = "") -> dict[str, Any]:
    return {
        "animation": False,
        "grid": {
            "left": 8,
            "right": 18,
            "top": 34,
            "bottom": 34 if x_name else 8,
            "containLabel": True,
        },
        "legend": {"show": False},
        "tooltip": _TOOLTIP,
        "aria": {"enabled": True},
    }


def _axes(x: Axis, y: Axis) -> dict[str, Any]:
    return {
        "xAxis": _at_ends({**_axis(x), "nameLocation": "middle", "nameGap": 28}),
        "yAxis": {
            **_axis(y),
            "nameLocation": "end",
            "nameTextStyle": {"color": "var(--muted)", "align": "left"},
        },
    }


def _at_ends(axis: dict[str, Any]) -> dict[str, Any]:
    """Keep the last label of a horizontal axis within the picture."""
    if axis["type"] != "category":
        axis["axisLabel"] |= {"alignMaxLabel": "right"}
    return axis


def _axis(axis: Axis) -> dict[str, Any]:
    bounds = {"min": axis.low, "max": axis.high}
    return {
        "type": axis.scale,
        "name": axis.name,
        "nameTextStyle": {"color": "var(--muted)"},
        "axisLine": {"onZero": False, "lineStyle": {"color": "var(--faint)"}},
        "axisTick": {"lineStyle": {"color": "var(--faint)"}},
        "axisLabel": {
            "color": "var(--muted)",
            "hideOverlap": True,
            "showMaxLabel": axis.ends or axis.scale == "category" or axis.high is None,
        },
        "splitLine": {"show": axis.scale != "category", "lineStyle": {"color": "var(--grid)"}},
        **{name: bound for name, bound in bounds.items() if bound is not None},
    }


def _limits(limits: Mapping[str, float], marks: Mapping[str, float] = {}) -> dict[str, Any]:
    return {
        "symbol": "none",
        "silent": True,
        "data": [
            {
                axis: value,
                "name": name,
                "label": {"formatter": name, "color": f"var(--{colour})", "position": place},
                "lineStyle": {"color": f"var(--{colour})", "type": "dashed"},
            }
            for axis, colour, place, lines in (
                ("yAxis", "bad", "insideEndTop", limits),
                ("xAxis", "good", "end", marks),
            )
            for name, value in lines.items()
        ],
    }


def _short(number: float) -> float:
    """Return a number with as many digits as a reader of a tooltip wants."""
    return float(f"{number:.5g}")
