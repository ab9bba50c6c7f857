"""Pages in a browser, by NiceGUI: controls, figures, and an address that follows the controls."""

from __future__ import annotations

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
from tools.look.palette import css
from tools.studio_app.catalogue import LESSONS
from tools.studio_app.drawn import basis_of, home_of, html_of, legend_of, lesson_of
from tools.studio_app.page import (
    Chart,
    Choice,
    Figure,
    Note,
    Page,
    Slider,
    Typed,
    format_value,
    query_of,
    read_values,
)
from tools.studio_app.plans import in_words

_STYLE = Path(__file__).with_name("look.css").read_text(encoding="utf-8")
_FRAME_S = 0.9  # of an animation
_HOME = """
<h1 class="title">Training studio</h1>
<p class="sees">Six groups of lessons on training large models, best read in this order. Every
figure is computed by the functions that plan and train. Have a run already?
<a href="/plan">Plan it</a>, <a href="/runs">watch it</a>, or <a href="/problems">mend it</a>.</p>
"""
_SCRIPT = """
<script>
// NiceGUI's chart may be made before its box has a width, and looks again only when that changes.
setInterval(() => document.querySelectorAll(".nicegui-echart").forEach((box) => {
  const drawn = box.querySelector("svg");
  if (!drawn || Math.abs(drawn.getAttribute("width") - box.clientWidth) < 3) return;
  box.style.width = "calc(100% - 1px)";
  setTimeout(() => (box.style.width = "100%"), 50);
}), 300);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, [contenteditable]")) return;
  const links = [...document.querySelectorAll("a.menu-link")];
  const here = links.findIndex((link) => link.classList.contains("here"));
  if (event.key === "]" && links[here + 1]) links[here + 1].click();
  if (event.key === "[" && links[here - 1]) links[here - 1].click();
  if (event.key === "p") document.querySelector("button.play")?.click();
});
</script>
"""


def add_pages(pages: Sequence[Page]) -> None:
    """Register every page with NiceGUI, and the order of lessons as the front page."""
    for page in pages:
        handler = _handler(page, pages)
        ui.page(f"/{page.slug}", title=f"{page.title} | studio", response_timeout=600)(handler)

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
    ui.add_head_html(f"<style>{css()}{_STYLE}</style>{_SCRIPT}")
    with (
        # With a value of its own, or NiceGUI asks each browser and waits 1 s for the answer.
        ui.left_drawer(value=False, bordered=True).props("width=238 show-if-above") as drawer,
        ui.element("nav"),
    ):
        for group, members in groupby(pages, key=lambda page: LESSONS[page.slug].group):
            ui.label(group).classes("menu-group")
            for page in members:
                link = ui.link(page.title, f"/{page.slug}").classes("menu-link")
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


class PageView:
    """One page as one browser sees it."""

    def __init__(self, page: Page, query: dict[str, str]) -> None:
        self.page = page
        self.values = read_values(page.controls, query)
        self._asked = 0
        self._shown: list[tuple[type[Figure], Any]] = []

    async def show(self) -> None:
        """Build the page with its first figures."""
        page = self.page
        ui.html(page.title, sanitize=False, tag="h1").classes("title")
        ui.html(lesson_of(LESSONS[page.slug]), sanitize=False).style("width:100%")
        if page.controls:
            with ui.element("section").classes("card controls").props('aria-label="settings"'):
                for control in page.controls:
                    self._add_control(control)
        self._area = ui.element("section").classes("figures").props("aria-live=polite")
        self._area.props["aria-label"] = "figures"
        with ui.row().classes("items-center"):
            copy = ui.button("Copy the link to this setting", icon="link").props(
                "flat dense no-caps"
            )
            copy.on("click", js_handler="() => navigator.clipboard.writeText(location.href)")
        ui.html(basis_of(page), sanitize=False).style("width:100%")
        figures = await self._computed()
        if ui.context.client.is_deleted:  # the browser did not wait for them
            return
        self._draw(figures)
        if page.every_s:
            ui.timer(page.every_s, self.refresh, immediate=False)

    def _add_control(self, control: Slider | Choice | Typed) -> None:
        wide = "wide" if isinstance(control, Typed) else ""
        with ui.element("div").classes(f"control {wide}"):
            match control:
                case Slider():
                    self._add_slider(control)
                case Choice():
                    ui.select(
                        list(control.options),
                        label=control.label,
                        value=self.values[control.name],
                        on_change=lambda event: self._set(control.name, event.value),
                    ).props("dense options-dense").props["data-control"] = control.name
                case Typed():
                    kind = ui.textarea if control.lines > 1 else ui.input
                    box = kind(
                        control.label,
                        value=self.values[control.name],
                        on_change=lambda event: self._set(
                            control.name, control.read(event.value or "")
                        ),
                    ).props(f"dense outlined debounce=400 maxlength={control.most}")
                    if control.lines > 1:
                        box.props(f"rows={control.lines}")
                    box.props["data-control"] = control.name

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
                self._add_player(slider, len(control.values))

    def _add_player(self, slider: ui.slider, count: int) -> None:
        def advance() -> None:
            slider.value = (int(slider.value or 0) + 1) % count

        timer = ui.timer(_FRAME_S, advance, active=False)

        def toggle() -> None:
            timer.active = not timer.active
            button.set_icon("pause" if timer.active else "play_arrow")

        button = ui.button(icon="play_arrow", on_click=toggle).props("flat round dense")
        button.classes("play")
        button.props["aria-label"] = "play or pause"

    async def _set(self, name: str, value: Any) -> None:
        if self.values[name] == value:
            return
        self.values[name] = value
        query = urlencode(query_of(self.page.controls, self.values))
        address = f"/{self.page.slug}{'?' if query else ''}{query}"
        ui.run_javascript(f"history.replaceState(null, '', {json.dumps(address)})")
        await self.refresh()

    async def refresh(self) -> None:
        """Compute the figures again; those of an older setting are dropped."""
        self._asked += 1
        asked = self._asked
        await asyncio.sleep(0.02)  # a slider that is being dragged asks again at once
        if asked != self._asked:
            return
        self._area.classes(add="waits")
        figures = await self._computed()
        if asked == self._asked:
            self._area.classes(remove="waits")
            self._draw(figures)

    async def _computed(self) -> list[Figure]:
        values = dict(self.values)
        figures = await run.io_bound(figures_of, self.page, values)
        return figures or []

    def _draw(self, figures: list[Figure]) -> None:
        """Put figures into the elements that are there, where their kinds are the same."""
        kinds = [type(figure) for figure in figures]
        if kinds != [kind for kind, _ in self._shown]:
            self._area.clear()
            with self._area:
                self._shown = [(type(figure), _new(figure)) for figure in figures]
            return
        for figure, (_, element) in zip(figures, self._shown, strict=True):
            if isinstance(figure, Chart):
                title, chart, legend = element
                title.set_content(escape(figure.title))
                legend.set_content(legend_of(figure.legend))
                if chart.options != figure.options:
                    chart.options.clear()
                    chart.options.update(figure.options)
                    chart.update()
            elif element.content != (content := html_of(figure)):
                element.set_content(content)


def figures_of(page: Page, values: dict[str, Any]) -> list[Figure]:
    """Return a page's figures, or the problems of its settings."""
    try:
        return page.figures(values)
    except ConfigError as error:
        problems = error.problems
    except ValueError as error:
        problems = [str(error)]
    return [
        Note(f"These settings cannot be: {in_words(problem, page.controls)}", "bad")
        for problem in problems
    ]


def _new(figure: Figure) -> Any:
    if not isinstance(figure, Chart):
        return ui.html(html_of(figure), sanitize=False).style("width:100%;min-width:0")
    with ui.element("div").classes("card"):
        title = ui.html(escape(figure.title), sanitize=False, tag="h2")
        legend = ui.html(legend_of(figure.legend), sanitize=False)
        chart = ui.echart(figure.options, renderer="svg")
        chart.style(f"width:100%;height:{figure.height}px")
    return title, chart, legend


def _with_unit(control: Slider, value: float) -> str:
    text = f"{value:,}" if isinstance(value, int) else format_value(value)
    return f"{text} {(value == 1 and control.one) or control.unit}".strip()
