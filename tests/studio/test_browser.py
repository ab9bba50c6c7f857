"""Every page in a real Chromium: no errors, all figures, and working controls."""

import re
import time
from html import unescape
from pathlib import Path

import pytest

from tests.browser import OVERFLOWS, PATIENCE_S, SHOWN, WIDTHS, Browser, needs_browser
from tests.browser import Page as Tab
from tests.studio.served import Studio
from tests.studio.test_pages import figures_of
from tests.tables import beside
from tests.tiers import rest_in_gate
from tools.studio_app.figures import Figure, html_of
from tools.studio_app.lessons import PAGES
from tools.studio_app.page import Page as StudioPage
from tools.studio_app.page import Slider, format_value
from tools.studio_app.runs import read_runs_of

_TABLES = beside(__file__, "browser.toml")
CUT, MENU_IS_FULL = _TABLES["cut"], _TABLES["menu_is_full"]

pytestmark = needs_browser


@pytest.fixture(autouse=True)
def same_runs(runs: Path, studio: Studio) -> None:
    """This process reads the runs that the studio reads."""
    read_runs_of(studio.runs)


def opened(browser: Browser, studio: Studio, path: str, **how: object) -> Tab:
    tab = browser.open(studio.address + path, **how)  # type: ignore[arg-type]
    tab.wait_for(SHOWN)
    return tab


@pytest.mark.slow("the first page waits for the studio's and transformers' imports")
@pytest.mark.parametrize("page", rest_in_gate("pages", PAGES), ids=lambda page: page.slug)
def test_a_page_opens(browser: Browser, studio: Studio, page: object) -> None:
    """At both widths, light and dark, with requests only to this machine."""
    slug = page.slug  # type: ignore[attr-defined]
    tab = opened(browser, studio, slug)
    for width in WIDTHS:
        for dark in (False, True):
            tab.resize(width)
            tab.color_scheme(dark)
            browser.listen(0.2)
            tab.wait_for(f"!({OVERFLOWS})")
            assert tab.evaluate(MENU_IS_FULL), width
        tab.wait_for(SHOWN)
        assert tab.evaluate(CUT) == [], width
    charts = tab.evaluate("document.querySelectorAll('.figures figure.chart').length")
    assert charts == sum("<figure " in html_of(figure) for figure in figures_of(slug))
    text = tab.evaluate("document.body.innerText")
    for name in page.lesson.computed_by:  # type: ignore[attr-defined]
        assert name in text
    assert tab.errors == []
    assert studio.said == ""
    elsewhere = [url for url in tab.requests if not url.startswith((studio.address, "data:"))]
    assert [url for url in elsewhere if not url.startswith("ws://127.0.0.1")] == []
    tab.call("Page.close")


@pytest.fixture(scope="module")
def tab(browser: Browser, studio: Studio) -> Tab:
    return browser.open(studio.address)


SLIDING = [page for page in PAGES if any(isinstance(c, Slider) for c in page.controls)]
TEXTS = "[...document.querySelector('.figures').children].map((card) => card.textContent)"


def texts_of(figures: list[Figure]) -> list[str]:
    """Return the words and numbers that a browser shows for figures."""
    shown = (re.sub(r"<[^>]*>", "", html_of(figure)) for figure in figures)
    return [words(unescape(text)) for text in shown]


def words(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("page", rest_in_gate("pages", SLIDING), ids=lambda page: page.slug)
def test_first_slider_shows_the_calls_result(tab: Tab, studio: Studio, page: StudioPage) -> None:
    """By keyboard, on every page: all its numbers, tables and texts of pictures."""
    slider = next(control for control in page.controls if isinstance(control, Slider))
    values = list(slider.values)
    place = values.index(slider.default)
    move = 1 if place + 1 < len(values) else -1
    value = format_value(values[place + move])
    before, after = figures_of(page.slug), figures_of(page.slug, **{slider.name: value})
    assert texts_of(before) != texts_of(after)
    tab.go(studio.address + page.slug)
    tab.wait_for(SHOWN)
    assert list(map(words, tab.evaluate(TEXTS))) == texts_of(before)
    tab.evaluate(f"document.querySelector('[data-control={slider.name}] [tabindex]').focus()")
    tab.press("ArrowRight" if move > 0 else "ArrowLeft")
    tab.wait_for(f"location.search.includes('{slider.name}={value}')")
    deadline = time.monotonic() + PATIENCE_S
    while list(map(words, tab.evaluate(TEXTS))) != texts_of(after):
        if time.monotonic() > deadline:
            assert list(map(words, tab.evaluate(TEXTS))) == texts_of(after)
        time.sleep(0.05)
    tab.go(str(tab.evaluate("location.href")))  # the address brings the setting back
    tab.wait_for(SHOWN)
    assert list(map(words, tab.evaluate(TEXTS))) == texts_of(after)
    assert tab.errors == []


@pytest.mark.gate("pages")
def test_colours_follow_the_readers_setting(browser: Browser, studio: Studio) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    tab = opened(browser, studio, "memory")
    light = tab.evaluate(colour)
    tab.color_scheme(dark=True)
    browser.listen(0.3)
    assert (light, tab.evaluate(colour)) == ("rgb(246, 245, 242)", "rgb(15, 15, 14)")


@pytest.mark.gate("pages")
def test_keys_lead_through_the_pages(browser: Browser, studio: Studio) -> None:
    tab = opened(browser, studio, PAGES[0].slug)
    for key, page in (("]", PAGES[1]), ("[", PAGES[0])):
        tab.press(key)
        tab.wait_for(f"location.pathname === '/{page.slug}'")
        tab.wait_for(SHOWN)
        assert tab.evaluate("document.querySelector('h1').textContent") == page.lesson.title
    assert tab.errors == []
