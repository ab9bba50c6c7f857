"""Figures as HTML text. Any text in them is escaped."""

from __future__ import annotations

from html import escape

from tools.studio_app.page import Code, Drawing, Figure, Links, Note, Numbers, Page, Table

_COPY = (
    '<button class="copy" onclick="navigator.clipboard.writeText('
    "this.parentElement.querySelector('pre').textContent)\">Copy</button>"
)


def html_of(figure: Figure) -> str:
    """Return a figure, other than a chart, as HTML."""
    match figure:
        case Numbers():
            return f'<div class="numbers">{"".join(map(_number, figure.numbers))}</div>'
        case Drawing():
            return _card(figure.title, f'<div class="scrolls drawing">{figure.svg}</div>')
        case Table():
            return _card(figure.title, _table(figure))
        case Links():
            links = (f'<a href="{escape(link)}">{escape(text)}</a>' for text, link in figure.links)
            return _card(figure.title, f'<p class="links">{"<br>".join(links)}</p>')
        case Code():
            code = f'<pre class="code" tabindex="0">{escape(figure.text)}</pre>'
            return _card(figure.title, _COPY + code)
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
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = []
    for place, row in enumerate(table.rows):
        cells = [escape(cell) for cell in row]
        link = table.links[place] if place < len(table.links) else None
        if link is not None:
            cells[0] = f'<a href="{escape(link)}">{cells[0]}</a>'
        kinds = ["short" if len(cell) < 16 else "long" if len(cell) > 28 else "" for cell in row]
        marked = (
            f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, cells, strict=True)
        )
        rows.append(f"<tr>{''.join(marked)}</tr>")
    return (
        f'<div class="scrolls"><table class="plain"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
