"""Figures as HTML text. Any text in them is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from tools.studio_app.catalogue import ABOUT, LESSONS, Lesson
from tools.studio_app.page import (
    Code,
    Drawing,
    Figure,
    Legend,
    Links,
    Note,
    Numbers,
    Page,
    Table,
)

_COPY = (
    '<button class="copy" onclick="navigator.clipboard.writeText('
    "this.parentElement.querySelector('pre').textContent)\">Copy</button>"
)
_LINES, _ROWS = 23, 20
"""Lines of a code, and rows of a table on a phone, that look.css shows at once, about."""


def html_of(figure: Figure) -> str:
    """Return a figure, other than a chart, as HTML."""
    match figure:
        case Numbers():
            return f'<div class="numbers">{"".join(map(_number, figure.numbers))}</div>'
        case Drawing():
            picture = f'<div class="drawing">{figure.svg}</div>'
            return _card(figure.title, picture + legend_of(figure.legend))
        case Table():
            return _card(figure.title, _table(figure))
        case Links():
            links = (f'<a href="{escape(link)}">{escape(text)}</a>' for text, link in figure.links)
            return _card(figure.title, f'<p class="links">{"<br>".join(links)}</p>')
        case Code():
            return _card(figure.title, _code(figure.text))
        case Note():
            colour = figure.verdict or ""
            return (
                f'<div class="card"><p class="note-text {colour}">{escape(figure.text)}</p></div>'
            )
    raise AssertionError(f"{figure} is drawn by the browser")


def basis_of(page: Page) -> str:
    """Return what a page rests on: formula, sources, and the functions that compute it."""
    links = "; ".join(
        f'<a href="{escape(address)}" target="_blank" rel="noopener noreferrer">{escape(text)}</a>'
        for text, address in page.sources
    )
    names = ", ".join(f"<code>{escape(name)}</code>" for name in page.computed_by)
    return (
        f'<div class="card basis"><h2>Formula, source and code</h2><p>{escape(page.formula)}</p>'
        f"<p>Source: {links}</p><p>Computed by {names}.</p></div>"
    )


def legend_of(legend: Legend) -> str:
    """Return the colours of a picture or a chart, as many on a line as there is room for."""
    parts = (
        f'<span><i style="background:var(--{colour})"></i>{escape(text)}</span>'
        for colour, text in legend
    )
    return f'<div class="legend">{"".join(parts)}</div>' if legend else ""


def lesson_of(lesson: Lesson) -> str:
    """Return the text beside the pictures of a page."""
    titled = {"What you see": lesson.sees, "What to try": lesson.tries}
    titled["In a real run"] = lesson.means
    parts = (f"<p><b>{title}</b>{escape(text)}</p>" for title, text in titled.items())
    return f'<div class="card lesson">{"".join(parts)}<div>{_code(lesson.command)}</div></div>'


def home_of(pages: Sequence[Page]) -> str:
    """Return the order of lessons: every page with what it shows."""
    cards = []
    for number, (group, members) in enumerate(
        groupby(pages, key=lambda page: LESSONS[page.slug].group), 1
    ):
        links = (
            f'<li><a href="/{page.slug}">{escape(page.title)}</a> '
            f"{escape(LESSONS[page.slug].sees.partition('. ')[0].rstrip('.'))}.</li>"
            for page in members
        )
        about = f'<p class="note-text">{escape(ABOUT[group])}</p>'
        cards.append(_card(f"{number}. {group}", f'{about}<ul class="home">{"".join(links)}</ul>'))
    return "".join(cards)


def _code(text: str) -> str:
    """Text to copy; a sign where it is longer than its box."""
    count = text.count("\n") + 1
    sign = _sign(f"{count} lines", count > _LINES, count > _LINES / 2)
    return f'{_COPY}<pre class="code" tabindex="0">{escape(text)}</pre>{sign}'


def _sign(text: str, is_cut: bool, is_cut_on_phones: bool) -> str:
    """Say that a box has more than it shows."""
    where = "" if is_cut else "on-phones"
    return f'<div class="sign {where}">{text}: scroll down</div>' if is_cut_on_phones else ""


def _card(title: str, content: str) -> str:
    return f'<div class="card"><h2>{escape(title)}</h2>{content}</div>'


def _number(number: object) -> str:
    label, text, note, verdict = vars(number).values()
    return (
        f'<div class="number"><div class="label">{escape(label)}</div>'
        f'<div class="value {verdict or ""}" data-figure="{escape(label)}">{escape(text)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )


def _table(table: Table) -> str:
    """On a phone look.css makes a card of each row, with the heads as labels."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = []
    for place, row in enumerate(table.rows):
        cells = [escape(cell) for cell in row]
        link = table.links[place] if place < len(table.links) else None
        if link is not None:
            cells[0] = f'<a href="{escape(link)}">{cells[0]}</a>'
        rows.append(f"<tr>{''.join(_cells(table.head, row, cells))}</tr>")
    is_tall = len(rows) > _ROWS
    return (
        f'<div class="scrolls {"tall" * is_tall}"><table class="plain">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        + _sign(f"{len(rows)} rows", False, is_tall)
    )


def _cells(head: Sequence[str], row: Sequence[str], cells: Sequence[str]) -> Iterable[str]:
    for name, text, cell in zip(head, row, cells, strict=True):
        kind = "short" if len(text) < 16 else "long" if len(text) > 28 else ""
        label = f' data-head="{escape(name)}"' if name and text else ""
        yield f'<td class="{kind}"{label}>{cell}</td>'
