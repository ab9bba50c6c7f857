"""Published memory of GPUs lies within the estimate's interval. `pytest -s` shows each run."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from harness.estimate.hardware import GPUS
from harness.estimate.held import GIB, Interval
from tests.estimate.published_memory import Card, carded, published


@pytest.fixture(scope="module")
def cards() -> list[Card]:
    return [carded(row) for row in published()]


def test_nothing_published_is_above_its_interval_or_wrongly_fits(cards: list[Card]) -> None:
    for card in cards:
        row, (low, high) = card.row, card.interval
        figure = f"{row.gib} GiB {row.shows}" if row.gib else ("ran" if row.ran else "ran out")
        doubt = f"  in doubt: {row.doubt}" if row.doubt else ""
        print(f"{row.name}: {figure}, {low / GIB:.2f} to {high / GIB:.2f}, {card.verdict}{doubt}")
    trusted = [card for card in cards if not card.row.doubt]
    assert not [card.row.name for card in trusted if card.is_above or card.is_false_fit]
    errors = [abs(card.error) for card in trusted if card.error is not None]
    assert statistics.median(errors) <= 0.05
    assert max(errors) <= 0.18


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
    out = replace(good, row=replace(good.row, gib=None, ran=False), verdict="fits")
    assert out.is_false_fit
