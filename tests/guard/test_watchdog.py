"""Files that a rank leaves behind, hung or not; tests/faults/test_hangs.py has real hangs."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.checkpoint.manifest import TrainState
from harness.guard.watchdog import Limits, Pulse, Watchdog
from harness.run.run import Run
from harness.runfolder import RunFolder
from tests.two_ranks import wait_for


def test_a_rank_writes_where_it_is_and_takes_that_away(tmp_path: Path) -> None:
    pulse = Pulse(Limits(floor_s=60, factor=10, first_s=60))
    watchdog = Watchdog(pulse, rank=3, world_size=4)
    watchdog.tick_s = 0.05
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    watchdog.write_to(folder, lambda report: None)
    path = folder / "rank-00003.json"
    first = json.loads(path.read_text())
    assert (first["rank"], first["phase"], first["pid"]) == (3, "set-up", os.getpid())
    pulse("save", 7)
    watchdog.start()
    wait_for(lambda: json.loads(path.read_text())["phase"] == "save", "the next heartbeat", 10)
    watchdog.close()
    assert not folder.exists()
    assert not watchdog.hung
    beat = watchdog._heartbeat(with_place=False)
    assert (beat["rank"], beat["phase"], beat["step"], beat["count"]) == (3, "save", 7, 1)


def test_a_heartbeat_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    """A rank may be stopped within a write: it is then named by the heartbeat before."""
    watchdog = Watchdog(Pulse(Limits(1, 1, 1)), rank=0, world_size=1)
    watchdog.write_to(tmp_path, lambda report: None)

    def write() -> None:
        for n in range(2000):
            watchdog._write(with_place=n % 2 == 0)

    reader = Watchdog(Pulse(Limits(1, 1, 1)), rank=1, world_size=2)
    reader.folder = tmp_path
    writer = threading.Thread(target=write)
    writer.start()
    ticks = []
    while writer.is_alive():
        ticks.append(reader.all_ranks()[0]["tick"])
    assert len(set(ticks)) > 10


def test_ticks_are_as_rare_as_there_are_ranks() -> None:
    pulse = Pulse(Limits(1, 1, 1))
    ranks = (1, 8, 16, 40, 64, 320, 1024)
    assert [Watchdog(pulse, 0, n).tick_s for n in ranks] == [1, 1, 2, 5, 5, 5, 16]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_reports_a_hang_says_so_in_the_status(rank: int, tmp_path: Path) -> None:
    """Rank 0, who writes it as a rule, may be the one that hangs."""
    writer, folder = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    writer.open()
    folder.attempt = writer.attempt
    plan, state = SimpleNamespace(world=SimpleNamespace(rank=rank)), TrainState(step=7)
    pages = SimpleNamespace(finish=lambda patience_s: None)
    run: Any = SimpleNamespace(
        plan=plan, is_writer=rank == 0, folder=folder, state=state, pages=pages
    )
    Run.hangs(cast(Run, run), {"message": "hang: rank 0"})
    status = folder.read_status() or {}
    assert (status["outcome"], status["code"], status["step"]) == ("failed", 78, 7)
    assert status["message"] == "hang: rank 0"
    assert [event["attempt"] for event in folder.read_events()] == [1]
