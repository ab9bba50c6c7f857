"""Shows pages in a browser with NiceGUI: controls, figures, and an address that follows them."""

import asyncio
import json
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nicegui import run, ui
from starlette.requests import Request

from harness.errors import ConfigError
from harness.report.chart import SCRIPT, STYLE
from harness.report.palette import css
from tools.studio_app.figures import Figure, Note, card, code, html_of
from tools.studio_app.page import (
    ABOUT,
    Choice,
    Control,
    Page,
    Slider,
    Typed,
    format_value,
    not_shown,
    query_of,
    read_values,
)
from tools.studio_app.plans import in_words

_LOOK = Path(__file__).with_name("look.css").read_text(encoding="utf-8")
_FRAME_S = 0.9  # of an animation
_HOME = """
<h1 class="title">Training studio</h1>
<p class="sees">Six groups of lessons on training large models, best read in this order. Every
figure is computed by the functions that plan and train. Have a run already?
<a href="/plan">Plan it</a>, <a href="/runs">watch it</a>, or <a href="/problems">fix it</a>.
<code>python tools/exercise.py</code> has exercises about these pages (docs/course.md).</p>
"""
_KEYS = """
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, [contenteditable]")) return;
  const links = [...document.querySelectorAll("a.menu-link")];
  const here = links.findIndex((link) => link.classList.contains("here"));
  if (event.key === "]" && links[here + 1]) links[here + 1].click();
  if (event.key === "[" && links[here - 1]) links[here - 1].click();
  if (event.key === "p") document.querySelector("button.play")?.click();
});
"""
_HEAD = f"<style>{css()}{STYLE}{_LOOK}</style><script>{SCRIPT}{_KEYS}</script>"


def add_pages(pages: Sequence[Page]) -> None:
    """Register every page with NiceGUI, and the list of lessons as the front page."""
    for page in pages:
        title = f"{page.lesson.title} | studio"
        ui.page(f"/{page.slug}", title=title, response_timeout=600)(_handler(page, pages))

    def show_home() -> None:
        _add_menu(None, pages)
        ui.html(_HOME, sanitize=False).style("width:100%")
        ui.html(home_of(pages), sanitize=False).classes("figures")

    ui.page("/", title="Training studio")(show_home)


def _handler(page: Page, pages: Sequence[Page]) -> Callable[[Request], Any]:
    async def show(request: Request) -> None:
        _add_menu(page, pages)
        await PageView(page, dict(request.query_params)).show()

    return show


def _add_menu(here: Page | None, pages: Sequence[Page]) -> None:
    ui.add_head_html(_HEAD)
    with (
        # An explicit value: otherwise NiceGUI asks each browser and waits 1 s for the answer.
        ui.left_drawer(value=False, bordered=True).props("width=238 show-if-above") as drawer,
        ui.element("nav"),
    ):
        for group, members in groupby(pages, key=lambda page: page.lesson.group):
            ui.label(group).classes("menu-group")
            for page in members:
                link = ui.link(page.lesson.title, f"/{page.slug}").classes("menu-link")
                if page is here:
                    link.classes("here").props("aria-current=page")
    with ui.header().classes("items-center no-wrap"):
        button = ui.button(icon="menu", on_click=drawer.toggle).props("flat round dense")
        button.props["aria-label"] = "menu"
        ui.link("Training studio", "/").style("font-weight:650")
        ui.space()
        ui.label("[ ] previous, next page; p plays").classes("gt-sm").style(
            "font-size:12px;color:var(--muted)"
        )


def home_of(pages: Sequence[Page]) -> str:
    """Return the list of lessons as HTML: every page with a sentence about it."""
    cards = []
    groups = groupby(pages, key=lambda page: page.lesson.group)
    for number, (group, members) in enumerate(groups, 1):
        links = (
            f'<li><a href="/{page.slug}">{escape(page.lesson.title)}</a> '
            f"{escape(page.lesson.sees.partition('. ')[0].rstrip('.'))}.</li>"
            for page in members
        )
        about = f'<p class="note-text">{escape(ABOUT[group])}</p>'
        cards.append(card(f"{number}. {group}", f'{about}<ul class="home">{"".join(links)}</ul>'))
    return "".join(cards)


def lesson_of(page: Page) -> str:
    """Return the text of a page as HTML."""
    lesson = page.lesson
    titled = {"What you see": lesson.sees, "What to try": lesson.tries}
    titled["In a real run"] = lesson.means
    parts = (f"<p><b>{title}</b>{escape(text)}</p>" for title, text in titled.items())
    return f'<div class="card lesson">{"".join(parts)}<div>{code(lesson.command)}</div></div>'


def basis_of(page: Page) -> str:
    """Return a page's basis as HTML: formula, sources, and the functions that compute it."""
    lesson = page.lesson
    links = "; ".join(
        f'<a href="{escape(address)}" target="_blank" rel="noopener noreferrer">{escape(text)}</a>'
        for text, address in lesson.sources
    )
    names = ", ".join(f"<code>{escape(name)}</code>" for name in lesson.computed_by)
    return (
        f'<div class="card basis"><h2>Formula, source and code</h2><p>{escape(lesson.formula)}</p>'
        f"<p>Source: {links}</p><p>Computed by {names}.</p></div>"
    )


class PageView:
    """One page as one browser sees it."""

    def __init__(self, page: Page, query: dict[str, str]) -> None:
        self.page = page
        self.values = read_values(page.controls, query)
        self._not_shown = not_shown(page.controls, query)
        self._asked = 0
        self._shown: list[ui.html] = []

    async def show(self) -> None:
        """Build the page with its first figures."""
        page = self.page
        ui.html(page.lesson.title, sanitize=False, tag="h1").classes("title")
        _wide(lesson_of(page))
        if page.controls:
            with ui.element("section").classes("card controls").props('aria-label="settings"'):
                for control in page.controls:
                    self._add_control(control)
        for sentence in self._not_shown:
            _wide(html_of(Note(sentence, "warning")))
        self._area = ui.element("section").classes("figures").props("aria-live=polite")
        self._area.props["aria-label"] = "figures"
        copy = ui.button("Copy the link to this setting", icon="link").props("flat dense no-caps")
        copy.style("align-self:flex-start")
        copy.on("click", js_handler="() => navigator.clipboard.writeText(location.href)")
        _wide(basis_of(page))
        figures = await self._computed()
        if ui.context.client.is_deleted:  # the browser did not wait for them
            return
        self._draw(figures)
        if page.every_s:
            ui.timer(page.every_s, self.refresh, immediate=False)

    def _add_control(self, control: Control) -> None:
        wide = "wide" if isinstance(control, Typed) else ""
        value, name = self.values[control.name], control.name
        with ui.element("div").classes(f"control {wide}"):
            match control:
                case Slider():
                    self._add_slider(control)
                    return
                case Choice():
                    box: Any = ui.select(list(control.options), label=control.label, value=value)
                    box.props("dense options-dense")
                case Typed():
                    kind = ui.textarea if control.lines > 1 else ui.input
                    box = kind(control.label, value=value)
                    box.props(f"dense outlined debounce=400 maxlength={control.most}")
                    if control.lines > 1:
                        box.props(f"rows={control.lines}")
            box.on_value_change(lambda event: self._set(name, control.read(event.value or "")))
            box.props["data-control"] = name

    def _add_slider(self, control: Slider) -> None:
        with ui.element("div").classes("control-label"):
            ui.label(control.label)
            shown = ui.label(_with_unit(control, self.values[control.name]))
            shown.classes("control-value")

        async def moved(event: Any) -> None:
            value = control.values[int(event.value)]
            shown.set_text(_with_unit(control, value))
            slider.props["aria-valuetext"] = shown.text
            await self._set(control.name, value)

        with ui.row().classes("items-center no-wrap w-full").style("gap:6px;width:100%"):
            slider = ui.slider(
                min=0,
                max=len(control.values) - 1,
                value=list(control.values).index(self.values[control.name]),
                on_change=moved,
            )
            slider.props["aria-label"] = f"{control.label}, {control.unit}".rstrip(", ")
            slider.props["data-control"] = control.name
            if control.plays:
                _add_player(slider, len(control.values))

    async def _set(self, name: str, value: Any) -> None:
        if self.values[name] == value:
            return
        self.values[name] = value
        query = urlencode(query_of(self.page.controls, self.values))
        address = f"/{self.page.slug}{'?' if query else ''}{query}"
        ui.run_javascript(f"history.replaceState(null, '', {json.dumps(address)})")
        await self.refresh()

    async def refresh(self) -> None:
        """Recompute the figures; drop those of an older setting."""
        self._asked += 1
        asked = self._asked
        await asyncio.sleep(0.02)  # a dragged slider asks again at once
        if asked != self._asked:
            return
        self._area.classes(add="waits")
        figures = await self._computed()
        if asked == self._asked and not self._area.is_deleted:
            self._area.classes(remove="waits")
            self._draw(figures)

    async def _computed(self) -> list[str]:
        figures = await run.io_bound(figures_of, self.page, dict(self.values))
        return [html_of(figure) for figure in figures or []]

    def _draw(self, figures: list[str]) -> None:
        """Put figures into the existing elements; only changed figures are sent."""
        if len(figures) != len(self._shown):
            self._area.clear()
            with self._area:
                self._shown = [_wide(figure) for figure in figures]
            return
        for figure, element in zip(figures, self._shown, strict=True):
            if element.content != figure:
                element.set_content(figure)


def figures_of(page: Page, values: dict[str, Any]) -> list[Figure]:
    """Return a page's figures, or the problems of its settings."""
    try:
        return page.figures(values)
    except ConfigError as error:
        problems = error.problems
    except ValueError as error:
        problems = [str(error)]
    return [
        Note(f"These settings are not possible: {in_words(problem, page.controls)}", "bad")
        for problem in problems
    ]


def _wide(content: str) -> ui.html:
    return ui.html(content, sanitize=False).style("width:100%;min-width:0")


def _add_player(slider: ui.slider, count: int) -> None:
    def advance() -> None:
        slider.value = (int(slider.value or 0) + 1) % count

    timer = ui.timer(_FRAME_S, advance, active=False)

    def toggle() -> None:
        timer.active = not timer.active
        button.set_icon("pause" if timer.active else "play_arrow")

    button = ui.button(icon="play_arrow", on_click=toggle).props("flat round dense")
    button.classes("play")
    button.props["aria-label"] = "play or pause"


def _with_unit(control: Slider, value: float) -> str:
    text = f"{value:,}" if isinstance(value, int) else format_value(value)
    return f"{text} {(value == 1 and control.one) or control.unit}".strip()
