"""docs/memory_cards.md: published figures beside the estimate of today."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from harness.estimate.hardware import GPUS
from harness.estimate.interval import Interval
from harness.estimate.units import GIB
from tests.two_ranks import REPOSITORY
from tools.proofs.cards.report import is_kept, markdown, summary
from tools.proofs.cards.runs import Card, carded, published


@pytest.fixture(scope="module")
def cards() -> list[Card]:
    return [carded(row) for row in published()]


def test_the_page_is_what_the_estimator_says(cards: list[Card]) -> None:
    page = (REPOSITORY / "docs/memory_cards.md").read_text(encoding="utf-8")
    assert page == markdown(cards)  # python tools/proofs/memory_cards.py --markdown it


def test_nothing_published_is_above_its_interval_or_wrongly_fits(cards: list[Card]) -> None:
    assert is_kept(cards)
    whole = [abs(card.error or 0) for card in cards if card.row.complete and not card.row.doubt]
    assert statistics.median(whole) <= 0.05


def test_rows_are_told_apart_and_of_known_gpus() -> None:
    rows = published()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.gpu for row in rows} <= GPUS.keys()
    assert all((row.gib is None) != (row.ran is None) for row in rows)


def test_what_is_wrong_is_noticed(cards: list[Card]) -> None:
    good = next(card for card in cards if card.row.gib and not card.row.doubt)
    assert good.row.gib
    low = replace(good, interval=Interval(0, int((good.row.gib - 0.1) * GIB)))
    assert low.is_above
    assert not is_kept([low])
    out = replace(good, row=replace(good.row, gib=None, ran=False), verdict="fits")
    assert out.is_false_fit
    assert "1 of 1 outcomes wrongly said to fit" in summary([out])
