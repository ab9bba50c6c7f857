"""The table and the picture of switched suspects, from starts whose times are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tools.figure import write_plot
from tools.proofs.overhead.suspects import (
    KEPT,
    SUSPECTS,
    Sides,
    density_picture,
    density_points,
    groups,
    starts_of,
    suspect_rows,
)


def _start(name: str, side: str, pace: float) -> list[dict[str, Any]]:
    """Two turns of two steps: the machine is twice as slow in the second."""
    seconds = pace * {"harness": 3.0, "bare": 2.0}[side]
    if name == "no metrics":
        seconds *= 0.5
    if name == "scattered pages":
        seconds *= 1.1
    faults = [7, 9] if side == "harness" else [5, 5]
    density = 0.25 if name == "scattered pages" else 0.75
    steps = [seconds, seconds, 2 * seconds, 2 * seconds]
    return [{"step_s": steps, "page_faults": faults, "density": density}]


def _measured() -> list[Sides]:
    """Of two rounds; the machine's pace differs from group to group."""
    measured = []
    for number, group in enumerate([*groups(8), *groups(8)], 1):
        sides: Sides = {name: {} for name, _ in group}
        for name, side in group:
            sides[name][side] = _start(name, side, float(number))
        measured.append(sides)
    return measured


def test_every_group_has_what_the_others_are_compared_with() -> None:
    found = groups(8)
    assert all(group[:2] == [(KEPT, "harness"), (KEPT, "bare")] for group in found)
    assert all(len(group) <= 8 for group in found)
    others = [start for group in found for start in group[2:]]
    assert others == [start for name in SUSPECTS if name != KEPT for start in starts_of(name)]


def test_the_others_are_told_to_keep_pages_as_the_harness_does_by_itself() -> None:
    names = {side: set(SUSPECTS[KEPT].environment_of(side)) for side in ("harness", "bare")}
    assert names == {
        "harness": set(),
        "bare": {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"},
    }
    returned = SUSPECTS["pages returned"]
    assert returned.environment_of("harness") == returned.environment_of("bare")
    assert set(returned.environment_of("harness")) == {"GLIBC_TUNABLES"}


def test_each_start_is_compared_with_those_of_the_same_turn() -> None:
    head, _, *rows = suspect_rows(_measured(), turns=2)
    cells = {row.split(" | ")[0].strip("| "): row.strip("|").split(" | ")[1:] for row in rows}
    cells = {name: [cell.strip() for cell in row] for name, row in cells.items()}
    assert set(cells) == set(SUSPECTS)
    assert head.count("|") == rows[0].count("|")
    assert cells[KEPT] == ["1.50, **1.500**, 1.50", "", "", "8", "5", "0.75", "0.75"]
    assert cells["no metrics"] == ["0.75, **0.750**, 0.75", "0.500", "", "8", "", "0.75", ""]
    scattered = ["1.50, **1.500**, 1.50", "1.100", "1.100", "8", "5", "0.25", "0.25"]
    assert cells["scattered pages"] == scattered


def test_time_over_density_is_that_of_starts_that_do_the_same(tmp_path: Path) -> None:
    points = density_points(_measured(), turns=2)
    assert {point[3] for point in points if not point[1]} == {1.0}
    assert [point[2:] for point in points if point[1]] == [(0.25, pytest.approx(1.1))] * 4
    write_plot(tmp_path / "starts.svg", density_picture(points))
    text = (tmp_path / "starts.svg").read_text()
    for words in ("the harness", "bare DeepSpeed, scattered on purpose", "time of a step"):
        assert f">{words}<" in text


def test_a_density_that_is_not_known_is_no_point_of_the_fit(tmp_path: Path) -> None:
    unknown = [("bare", False, math.nan, 1.0)]
    write_plot(tmp_path / "starts.svg", density_picture(unknown))
