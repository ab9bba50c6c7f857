"""The page of a sweep in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import WIDTHS, Browser, needs_browser
from tests.sweeps.shown import written


def test_values_and_reasons_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = written(tmp_path).read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert "diverged: a reason with &lt;b&gt;tags" in page


@needs_browser
def test_the_page_is_whole_at_every_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = written(tmp_path)
    with Browser() as browser:
        for width in WIDTHS:
            for dark in (False, True):
                tab = browser.open(page.as_uri(), width=width, dark=dark)
                assert tab.errors == []
                assert not tab.overflows
                assert tab.requests == [page.as_uri()]
                # For each trial with a finite metric: a curve, a line and a dot per key.
                count = "document.querySelectorAll('.area path:not(.mark) title').length"
                assert tab.evaluate(count) == 8 * (2 + 4)
