"""Percentiles over all starts, from measurements whose ratios are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tools.figure import write_plot
from tools.proofs.overhead.job import LAYERS
from tools.proofs.overhead.recorder import KERNEL
from tools.proofs.overhead.spread import (
    follows_density,
    kernel_rows,
    picture,
    place_effects,
    spread_of,
    spread_rows,
    turn_ratios,
)

_SLOWER = {"harness": 1.0, "bare": 2.0, "trainer": 4.0}


def _cell(ranks: int) -> dict[str, Any]:
    """21 starts of each side: start n takes n + 1 times as long as the first of its side."""
    rounds = [
        {
            side: [
                {
                    "step_s": [9.0, factor * (n + 1), 0.5],
                    "kernel_ms": [100.0],
                    "density": 0.25 * factor,
                    **{kind: [place, 10 * place] for place, kind in enumerate(KERNEL, 1)},
                }
            ]
            for side, factor in _SLOWER.items()
        }
        for n in range(21)
    ]
    return {"stage": 3, "ranks": ranks, "layers": LAYERS * ranks, "rounds": rounds}


def test_percentiles_are_those_of_the_starts() -> None:
    cells = [_cell(1), _cell(2)]
    rows = dict(spread_rows(cells, turns=3))
    # 9 s is the median of a start's three steps from the ninth start on of the harness.
    assert list(rows) == [
        "rounds",
        "the harness / bare DeepSpeed",
        "the harness / Trainer",
        *(f"time where started {place} / the side's mean" for place in ("first", "second", "last")),
        "correlation of a start's time with the density of its pages",
        "the harness / bare DeepSpeed: standard deviation between turns",
        "standard deviation between starts, beyond turns",
    ]
    assert rows["the harness / bare DeepSpeed"][0].startswith("0.50, **")
    assert rows["rounds"] == ["21", "21"]
    for row in rows.values():
        assert row[0] == row[1]


def test_a_spread_is_the_starts_or_the_turns() -> None:
    up, down = math.exp(0.1), math.exp(-0.1)
    starts_alone = spread_of([[up, up, up], [down, down, down]])
    assert starts_alone.turn == pytest.approx(0)
    assert starts_alone.start == pytest.approx(0.1 * math.sqrt(2))
    turns_alone = spread_of([[up, down], [up, down], [down, up]])
    assert turns_alone.turn == pytest.approx(0.1 * math.sqrt(2))
    assert turns_alone.start == 0
    assert math.isnan(spread_of([[1.0, 2.0]]).start)


def test_what_an_earlier_start_costs_is_told_apart_from_its_side() -> None:
    """The first of a round takes a tenth longer, whichever side it is; one side takes twice."""
    orders = (("harness", "bare", "trainer"), ("bare", "trainer", "harness"))
    orders += (("trainer", "harness", "bare"),)
    rounds = [
        {
            side: [{"step_s": [_SLOWER[side] * (1.0 if n else 1.1)], "density": 0.9 if n else 0.4}]
            for n, side in enumerate(order)
        }
        for order in orders
    ]
    first, second, last = place_effects({"rounds": rounds})
    assert first / second == pytest.approx(1.1)
    assert second == pytest.approx(last)
    assert follows_density({"rounds": rounds}) == pytest.approx(-1)


def test_a_ratio_is_of_the_same_turn() -> None:
    """A machine that is slower in the second turn is so for both."""
    sides = {
        "harness": [{"step_s": [1.0, 1.0, 3.0, 3.0]}],
        "bare": [{"step_s": [2.0, 2.0, 6.0, 6.0]}],
    }
    assert turn_ratios([sides], turns=2) == [[0.5, 0.5]]


def test_medians_of_the_kernels_counters_are_over_all_steps() -> None:
    rows = dict(kernel_rows([_cell(1)]))
    assert rows["milliseconds in it: the harness"] == ["100 (100 to 100)"]
    assert rows["page faults: the harness"] == ["6 (6 to 6)"]  # 1 and 10 in turn
    assert rows["switches of a thread that is sent away: Trainer"] == ["16 (16 to 16)"]  # 16.5
    assert rows["share of its 2 MiB blocks that its pages fill: bare DeepSpeed"] == [
        "0.50 (0.50 to 0.50)"
    ]


def test_every_start_is_in_the_picture(tmp_path: Path) -> None:
    write_plot(tmp_path / "starts.svg", picture({"cells": [_cell(1), _cell(2)]}))
    text = (tmp_path / "starts.svg").read_text()
    for words in (
        "ZeRO 3",
        "1 rank",
        "2 ranks",
        "20 layers",
        "bare DeepSpeed",
        "lines are medians",
    ):
        assert f">{words}<" in text
    assert text.count("<use ") >= 2 * 3 * 21
