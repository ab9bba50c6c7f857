"""Figures of a page as data, and their HTML. All text in them is escaped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from harness.report import chart as charts

Verdict = Literal["good", "warning", "bad"]
Legend = Sequence[tuple[str, str]]
"""(name of a palette colour, what it stands for)."""
COPY = (
    '<button class="copy" onclick="navigator.clipboard.writeText('
    "this.parentElement.querySelector('pre').textContent)\">Copy</button>"
)
_LINES, _ROWS = 23, 20
"""Approximate limits of look.css: lines of code, and rows of a table on a phone, shown at once."""

_MOST_CATEGORIES = 16
_LONG = 36  # letters of all categories that fit side by side on a phone


@dataclass(frozen=True)
class Number:
    """A number with its label; `note` explains it."""

    label: str
    text: str
    note: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Numbers:
    """Numbers side by side."""

    numbers: Sequence[Number]


@dataclass(frozen=True)
class Drawing:
    """A picture as SVG (svg.py) or HTML, as wide as its window."""

    title: str
    svg: str
    legend: Legend = ()


@dataclass(frozen=True)
class Table:
    """Rows of text. `head` is the columns' names, separated by | if a string; `links` are the
    addresses that the first cells link to.
    """

    title: str
    head: str | Sequence[str]
    rows: Sequence[Sequence[str]]
    links: Sequence[str | None] = ()


@dataclass(frozen=True)
class Code:
    """Text to copy."""

    title: str
    text: str


@dataclass(frozen=True)
class Note:
    """A sentence."""

    text: str
    verdict: Verdict | None = None


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


Figure = Numbers | charts.Chart | Bars | charts.Heat | Drawing | Table | Code | Note


def numbers(*rows: tuple[Any, ...]) -> Numbers:
    """Return numbers from rows of (label, text, note, verdict); the last two are optional."""
    return Numbers([Number(*row) for row in rows])


def html_of(figure: Figure) -> str:
    """Return a figure as HTML."""
    match figure:
        case Numbers():
            return f'<div class="numbers">{"".join(map(_number, figure.numbers))}</div>'
        case Drawing():
            legend = [(text, f"var(--{colour})", "", "") for colour, text in figure.legend]
            picture = f'<div class="drawing">{figure.svg}</div>'
            return card(figure.title, picture + charts.legend_of(legend, "blocks"))
        case Table():
            return card(figure.title, _table(figure))
        case Code():
            return card(figure.title, code(figure.text))
        case Note():
            text = f'<p class="note-text {figure.verdict or ""}">{escape(figure.text)}</p>'
            return f'<div class="card">{text}</div>'
        case Bars():
            return _bars(figure)
    return charts.html_of(figure)


def code(text: str) -> str:
    """Return text to copy, with a hint if it is longer than its box."""
    count = text.count("\n") + 1
    sign = _sign(f"{count} lines", count > _LINES, count > _LINES / 2)
    return f'{COPY}<pre class="code" tabindex="0">{escape(text)}</pre>{sign}'


def card(title: str, content: str) -> str:
    """Return a box with a title."""
    return f'<div class="card"><h2>{escape(title)}</h2>{content}</div>'


def _sign(text: str, is_cut: bool, is_cut_on_phones: bool) -> str:
    """Return a hint that a box holds more than it shows."""
    where = "" if is_cut else "on-phones"
    return f'<div class="sign {where}">{text}: scroll down</div>' if is_cut_on_phones else ""


def _number(number: Number) -> str:
    return (
        f'<div class="number"><div class="label">{escape(number.label)}</div>'
        f'<div class="value {number.verdict or ""}" data-figure="{escape(number.label)}">'
        f'{escape(number.text)}</div><div class="note">{escape(number.note)}</div></div>'
    )


def _table(table: Table) -> str:
    """Return a table as HTML. On a phone, look.css turns each row into a card with the heads as
    labels.
    """
    heads = table.head.split("|") if isinstance(table.head, str) else table.head
    rows = []
    for place, row in enumerate(table.rows):
        link = table.links[place] if place < len(table.links) else None
        cells = []
        for number, (name, text) in enumerate(zip(heads, row, strict=True)):
            kind = "short" if len(text) < 16 else "long" if len(text) > 28 else ""
            label = f' data-head="{escape(name)}"' if name and text else ""
            shown = escape(text)
            if link is not None and not number:
                shown = f'<a href="{escape(link)}">{shown}</a>'
            cells.append(f'<td class="{kind}"{label}>{shown}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    is_tall = len(rows) > _ROWS
    return (
        f'<div class="scrolls {"tall" * is_tall}"><table class="plain">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        + _sign(f"{len(rows)} rows", False, is_tall)
    )


# --- bars in the frame of the report's charts ---


def _bar_colour(bars: Bars, place: int) -> str:
    name = bars.colours.get(list(bars.parts)[place])
    return f"var(--{name})" if name else charts.colour_of(place)


def _bars(bars: Bars) -> str:
    """Return the chart as a <figure>."""
    count, series = len(bars.categories), len(bars.parts)
    columns = list(zip(*bars.parts.values(), strict=True))
    tops = [sum(column) if bars.together else max(column) for column in columns]
    low = min(0.0, *(value for column in columns for value in column))
    high = 1.06 * max(*tops, *(value for _, value in bars.limits), 0.0) or (1.0 if low == 0 else 0)
    y = charts.Scale(1.06 * low, high)
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
                f'background:{_bar_colour(bars, number)}"></i>'
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
    grid = charts.svg_of(charts.grid_of(y))
    body = (
        f"<div class=always>{grid}<div class=columns>{''.join(boxes)}</div>"
        f"<div style=--letters:{longest}>{charts.labels_of(labels, turned)}</div></div>"
    )
    legend = [(name, _bar_colour(bars, n), "", "") for n, name in enumerate(bars.parts)]
    return charts.figure_of(
        *(bars.title, bars.unit, charts.plot_of(y, body, bars.limits)),
        charts.legend_of(legend if series > 1 else [], "blocks"), height=bars.height,
        values=_bar_values(bars),
    )  # fmt: skip


def _bar_values(bars: Bars) -> dict[str, Any]:
    """Return the values that chart.js shows under the pointer."""
    names = list(bars.categories)
    places = {"x": [place + 0.5 for place in range(len(names))]}
    curves = [
        charts.Curve(name, _bar_colour(bars, number), places, list(sizes))
        for number, (name, sizes) in enumerate(bars.parts.items())
    ]
    own = charts.Chart("", bars.title, bars.unit, curves, axes={"x": ""}, x_range=(0, len(names)))
    return charts.data_of(own) | {"names": names}
