"""The table and the picture of switched suspects, from starts whose times are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tools.figure import write_plot
from tools.proofs.overhead.mapped import mapped_rows
from tools.proofs.overhead.placement import Placed, fit, placed_starts, placement_picture
from tools.proofs.overhead.suspects import (
    PAGES_KEPT,
    SUSPECTS,
    Sides,
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
    divided = groups(8)
    assert all(group[:2] == [(PAGES_KEPT, "harness"), (PAGES_KEPT, "bare")] for group in divided)
    assert all(len(group) <= 8 for group in divided)
    others = [start for group in divided for start in group[2:]]
    assert others == [start for name in SUSPECTS if name != PAGES_KEPT for start in starts_of(name)]


def test_the_others_are_told_to_keep_pages_as_the_harness_does_by_itself() -> None:
    names = {side: set(SUSPECTS[PAGES_KEPT].environment_of(side)) for side in ("harness", "bare")}
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
    assert cells[PAGES_KEPT] == ["1.50, **1.500**, 1.50", "", "", "8", "5", "0.75", "0.75"]
    assert cells["no metrics"] == ["0.75, **0.750**, 0.75", "0.500", "", "8", "", "0.75", ""]
    scattered = ["1.50, **1.500**, 1.50", "1.100", "1.100", "8", "5", "0.25", "0.25"]
    assert cells["scattered pages"] == scattered


def test_density_and_time_are_beside_the_mean_of_those_that_do_the_same(tmp_path: Path) -> None:
    sides: Sides = {
        "no watchdog": {"harness": _start("no watchdog", "harness", 1.0)},
        PAGES_KEPT: {side: _start(PAGES_KEPT, side, 2.0) for side in ("harness", "bare")},
        "scattered pages": {"bare": _start("scattered pages", "bare", 2.0)},
        "no metrics": {"harness": _start("no metrics", "harness", 9.0)},  # does less
    }
    sides["no watchdog"]["harness"][0]["density"] = 0.95
    starts = list(placed_starts([sides], turns=2))
    rows = [(s.side, s.is_scattered, s.density_off, s.time) for s in starts]
    assert rows == [
        ("harness", False, pytest.approx(0.1), pytest.approx(1 / 1.5)),
        ("harness", False, pytest.approx(-0.1), pytest.approx(2 / 1.5)),
        ("bare", False, pytest.approx(0.25), pytest.approx(1 / 1.05)),
        ("bare", True, pytest.approx(-0.25), pytest.approx(1.1 / 1.05)),
    ]
    write_plot(tmp_path / "starts.svg", placement_picture(starts))
    text = (tmp_path / "starts.svg").read_text()
    for words in ("the harness", "bare DeepSpeed, scattered on purpose", "time of a step"):
        assert f">{words}<" in text


def test_a_start_alone_and_one_of_unknown_density_are_no_points() -> None:
    alone: Sides = {PAGES_KEPT: {"bare": _start(PAGES_KEPT, "bare", 1.0)}}
    unknown: Sides = {
        name: {"bare": _start(name, "bare", 1.0)} for name in (PAGES_KEPT, "scattered pages")
    }
    unknown["scattered pages"]["bare"][0]["density"] = math.nan
    assert not list(placed_starts([alone, unknown], turns=2))
    assert "not known" in fit([])


def test_the_fit_says_how_much_longer_a_step_takes() -> None:
    starts = [Placed("bare", False, 0.5, off, 1 - 0.2 * off) for off in (-0.2, 0.1, 0.4)]
    assert "correlated by -1.00: where density is 0.1 lower, a step takes 2.00% longer" in fit(
        starts
    )


def test_the_lines_that_map_most_pages_come_first() -> None:
    faults = {
        "harness": {"a.py:1 mm": 20, "b.py:2 add": 6},
        "bare": {"b.py:2 add": 30, "c.py:3 mul": 2},
    }
    rows = list(mapped_rows({side: [{"faults": pages}] for side, pages in faults.items()}, most=2))
    assert rows[2:] == [
        "| `b.py:2 add` | 3 | 15 |",  # of one step of two
        "| `a.py:1 mm` | 10 | 0 |",
        "| 1 others | 0 | 1 |",
        "| all operators | 13 | 16 |",
    ]


def test_a_line_that_maps_less_than_a_page_a_step_is_one_of_the_others() -> None:
    faults = {  # both lines map two pages in two steps, of all sides together
        "harness": {"a.py:1 mm": 1, "b.py:2 add": 2},
        "bare": {"a.py:1 mm": 1},
    }
    sides = {side: [{"faults": pages}] for side, pages in faults.items()}
    assert list(mapped_rows(sides))[2:] == [
        "| `b.py:2 add` | 1 | 0 |",
        "| 1 others | 0 | 0 |",
        "| all operators | 2 | 0 |",
    ]
