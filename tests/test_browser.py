"""The browser used by other tests must notice errors."""

import struct

import pytest

from tests.browser import needs_browser

pytestmark = needs_browser


@pytest.fixture
def page_at(tmp_path):
    def write(html: str) -> str:
        path = tmp_path / "page.html"
        path.write_text(f"<!doctype html><meta charset=utf-8>{html}")
        return path.as_uri()

    return write


def test_errors_of_a_page_are_seen(browser, page_at):
    html = "<script>console.error('first'); fetch('file:///nowhere'); nothing.second()</script>"
    page = browser.open(page_at(html))
    page.wait_for("true")
    assert any("first" in error for error in page.errors)
    assert any("nothing is not defined" in error for error in page.errors)


def test_a_good_page_has_no_errors_and_one_request(browser, page_at):
    page = browser.open(page_at("<h1>1 + 1</h1>"))
    assert page.evaluate("1 + 1") == 2
    assert page.errors == []
    assert len(page.requests) == 1


@pytest.mark.gate("pages")
def test_width_and_colour_scheme_reach_the_page(browser, page_at, tmp_path):
    viewport = "<meta name=viewport content='width=device-width'>x"
    page = browser.open(page_at(viewport), 390, dark=True)
    assert page.evaluate("innerWidth") == 390
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert not page.overflows
    page.screenshot(tmp_path / "page.png")
    header = (tmp_path / "page.png").read_bytes()[:24]
    assert struct.unpack(">II", header[16:])[0] == 390


@pytest.mark.gate("pages")
def test_mouse_and_keys_reach_the_page(browser, page_at):
    html = (
        "<button onclick='window.clicked = 1'>a</button>"
        "<input type=range min=0 max=10 value=5 onmouseover='window.hovered = 1'>"
    )
    page = browser.open(page_at(html))
    page.click("button")
    page.hover("input")
    page.evaluate("document.querySelector('input').focus()")
    page.press("ArrowRight")
    assert page.evaluate("[clicked, hovered, document.querySelector('input').value]") == [1, 1, "6"]
