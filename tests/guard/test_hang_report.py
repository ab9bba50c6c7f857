"""The hang report names ranks by their last heartbeats."""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

from harness.guard.watchdog import judge, place_of
from harness.layout.grid import Grid
from tests.two_ranks import wait_for


def heartbeat(rank: int, count: int, tick: int, **more: Any) -> dict[str, Any]:
    found = {"rank": rank, "host": f"n{rank}", "pid": 10 + rank, "phase": "step", "step": 5}
    return {**found, "count": count, "seconds": 30.0, "tick": tick, **more}


def test_a_rank_that_no_longer_writes_is_named() -> None:
    before = [heartbeat(0, 9, 4), heartbeat(1, 9, 4), heartbeat(2, 8, 3)]
    after = [heartbeat(0, 9, 5, at="x"), heartbeat(1, 9, 5, at="x"), heartbeat(2, 8, 3)]
    report = judge(before, after, "why", 0)
    assert (report["held_up_by"], report["silent"], report["behind"]) == ([2], [2], [])
    assert "rank 2 on n2 (process 12), in 'step' of step 5: stopped" in report["message"]
    assert "2 ranks (0-1) in 'step' of step 5, x" in report["message"]


def test_a_rank_that_never_wrote_is_named() -> None:
    report = judge([heartbeat(0, 9, 4), {"rank": 1}], [heartbeat(0, 9, 4), {"rank": 1}], "why", 0)
    assert report["held_up_by"] == [1]
    assert "rank 1, never wrote: stopped" in report["message"]


def test_a_rank_is_named_with_its_place_in_the_layout() -> None:
    grid = Grid(8, pipeline=2, tensor=2)
    before = [heartbeat(rank, 9, 4) for rank in range(8)]
    after = [heartbeat(rank, 9, 4 if rank == 6 else 5, at="x") for rank in range(8)]
    del after[6]["at"]
    report = judge(before, after, "why", 0, grid.described)
    assert "rank 6 (data 1, pipeline 1, tensor 0) on n6 (process 16), in" in report["message"]


def test_a_rank_that_writes_but_is_behind_is_named() -> None:
    late = {"phase": "data", "at": "y"}
    before = [heartbeat(0, 9, 4), heartbeat(1, 8, 4, phase="data")]
    report = judge(before, [heartbeat(0, 9, 5, at="x"), heartbeat(1, 8, 5, **late)], "why", 0)
    assert (report["held_up_by"], report["silent"]) == ([1], [])
    assert (
        "rank 1 on n1 (process 11), in 'data' of step 5, y, for 30 s: behind" in report["message"]
    )


def test_where_all_wait_at_one_place_no_rank_is_blamed() -> None:
    before = [heartbeat(rank, 9, 4) for rank in range(4)]
    after = [heartbeat(rank, 9, 5, at="x") for rank in range(4)]
    report = judge(before, after, "why", 3)
    assert report["held_up_by"] == []
    assert "no rank is behind" in report["message"]
    assert "4 ranks (0-3)" in report["message"]


def test_a_place_is_the_innermost_line_of_the_library_and_what_it_waits_in() -> None:
    from harness.data.batches import load_ahead

    release = threading.Event()
    batches = load_ahead(lambda _: release.wait(), 1)
    thread = threading.Thread(target=next, args=(batches,))
    thread.start()

    def place() -> str:
        assert thread.ident
        return place_of(sys._current_frames()[thread.ident])

    expected = r".*/threading\.py:\d+ wait in data/batches\.py:\d+ load_ahead"
    wait_for(lambda: re.fullmatch(expected, place()), "the thread to wait for its batch", 10)
    release.set()
    thread.join()
    batches.close()
