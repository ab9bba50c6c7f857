"""Percentiles over all starts, from measurements whose ratios are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.figure import write_plot
from tools.proofs.overhead.job import LAYERS
from tools.proofs.overhead.recorder import KERNEL
from tools.proofs.overhead.spread import kernel_rows, picture, spread_rows

_SLOWER = {"harness": 1.0, "bare": 2.0, "trainer": 4.0}


def _cell(ranks: int) -> dict[str, Any]:
    """21 starts of each side: start n takes n + 1 times as long as the first of its side."""
    rounds = [
        {
            side: [
                {
                    "step_s": [9.0, factor * (n + 1), 0.0],
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
    rows = dict(spread_rows(cells))
    # 9 s is the median of a start's three steps from the ninth start on of the harness.
    assert list(rows) == [
        "rounds",
        "the harness / bare DeepSpeed",
        "the harness / Trainer",
        "bare DeepSpeed / itself, one start before",
    ]
    assert rows["the harness / bare DeepSpeed"][0].startswith("0.50, **")
    assert rows["rounds"] == ["21", "21"]
    for row in rows.values():
        assert row[0] == row[1]
    # Starts of bare DeepSpeed: 2, 4, 6, 8, then 9 s each: 17 of 20 ratios are 1.
    assert rows["bare DeepSpeed / itself, one start before"][0] == "1.00, **1.000**, 1.52"


def test_medians_of_the_kernels_counters_are_over_all_steps() -> None:
    rows = dict(kernel_rows([_cell(1)]))
    assert rows["page faults: the harness"] == ["6"]  # 1 and 10 in turn
    assert rows["switches of a thread that is sent away: Trainer"] == ["16"]  # 16.5, to even


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
