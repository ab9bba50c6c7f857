"""Figures of a page as data, and their HTML. All text in them is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from harness.report import chart as charts
from harness.report.chart import Chart, Heat
from tools.studio_app import bars
from tools.studio_app.bars import Bars

Verdict = Literal["good", "warning", "bad"]
Legend = Sequence[tuple[str, str]]
"""(name of a palette colour, what it stands for)."""
COPY = (
    '<button class="copy" onclick="navigator.clipboard.writeText('
    "this.parentElement.querySelector('pre').textContent)\">Copy</button>"
)
_LINES, _ROWS = 23, 20
"""Approximate limits of look.css: lines of code, and rows of a table on a phone, shown at once."""


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
    addresses behind first cells.
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


Figure = Numbers | Chart | Bars | Heat | Drawing | Table | Code | Note


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
            return bars.html_of(figure)
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
