"""Bar charts in the frame of the report's charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.report.chart import (
    Scale,
    colour_of,
    figure_of,
    grid_of,
    labels_of,
    legend_of,
    plot_of,
    rounded,
    svg_of,
)

_MOST_CATEGORIES = 16
_LONG = 36  # letters of all categories that fit side by side on a phone


@dataclass(frozen=True)
class Bars:
    """Bars for each category, stacked or side by side."""

    title: str
    unit: str
    categories: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    colours: Mapping[str, str] = field(default_factory=dict)
    """Palette names by part; a part without one takes the colour of its position."""
    limits: Sequence[tuple[str, float]] = ()
    together: bool = True
    height: int = 0


def _colour(bars: Bars, place: int) -> str:
    name = bars.colours.get(list(bars.parts)[place])
    return f"var(--{name})" if name else colour_of(place)


def html_of(bars: Bars) -> str:
    """Return the chart as a <figure>."""
    count, series = len(bars.categories), len(bars.parts)
    columns = list(zip(*bars.parts.values(), strict=True))
    tops = [sum(column) if bars.together else max(column) for column in columns]
    low = min(0.0, *(value for column in columns for value in column))
    high = 1.06 * max(*tops, *(value for _, value in bars.limits), 0.0) or (1.0 if low == 0 else 0)
    y = Scale(1.06 * low, high)
    boxes = []
    for place, column in enumerate(columns):
        begin = 0.0
        for number, size in enumerate(column):
            bottom = begin if bars.together else min(0.0, size)
            across = (place + 0.5) / count
            if not bars.together:
                across = (place + 0.12 + 0.76 * (number + 0.5) / series) / count
            width = 0.76 / count / (1 if bars.together else series)
            height = abs(size) / (y.high - y.low)
            boxes.append(
                f'<i style="left:{100 * across:.2f}%;width:{100 * width:.2f}%;'
                f"bottom:{100 * y.share(bottom):.2f}%;height:{100 * height:.2f}%;"
                f'background:{_colour(bars, number)}"></i>'
            )
            begin += size if bars.together else 0
    every = -(-count // _MOST_CATEGORIES)
    labels = [
        ((place + 0.5) / count, text)
        for place, text in enumerate(bars.categories)
        if place % every == 0
    ]
    letters = sum(len(text) for _, text in labels)
    turned = "turned" if letters > 2 * _LONG else "turned-on-phones" if letters > _LONG else "words"
    longest = max((len(text) for _, text in labels), default=0)
    body = (
        f"<div class=always>{svg_of(grid_of(y))}<div class=columns>{''.join(boxes)}</div>"
        f"<div style=--letters:{longest}>{labels_of(labels, turned)}</div></div>"
    )
    legend = [(name, _colour(bars, n), "", "") for n, name in enumerate(bars.parts)]
    return figure_of(
        *(bars.title, bars.unit, plot_of(y, body, bars.limits)),
        legend_of(legend if series > 1 else [], "blocks"), height=bars.height, values=_values(bars),
    )  # fmt: skip


def _values(bars: Bars) -> dict[str, Any]:
    """Return the values that chart.js shows under the pointer."""
    places = [place + 0.5 for place in range(len(bars.categories))]
    curves = [
        {
            "label": name,
            "colour": _colour(bars, number),
            "x": {"x": places},
            "y": list(map(rounded, sizes)),
        }
        for number, (name, sizes) in enumerate(bars.parts.items())
    ]
    names, ranges = list(bars.categories), {"x": (0, len(places))}
    return {"axes": {"x": ""}, "names": names, "curves": curves, "ranges": ranges}
