"""What a rank leaves behind, hung or not; tests/faults/test_hangs.py has real hangs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from harness.checkpoint.manifest import TrainState
from harness.guard.pulse import Limits, Pulse
from harness.guard.watchdog import Watchdog
from harness.runfolder import RunFolder
from harness.start import Run
from tests.two_ranks import wait_for


def test_a_rank_writes_where_it_is_and_takes_that_away(tmp_path: Path) -> None:
    pulse = Pulse(Limits(floor_s=60, factor=10, first_s=60))
    watchdog = Watchdog(pulse, rank=3, world_size=4)
    watchdog.tick_s = 0.05
    watchdog.folder = tmp_path / "heartbeats"
    watchdog.folder.mkdir()
    pulse("save", 7)
    watchdog.start()
    path = watchdog.folder / "rank-00003.json"
    wait_for(lambda: path.exists() and path.stat().st_size, "a heartbeat", 10)
    watchdog.close()
    assert not watchdog.folder.exists()
    assert not watchdog.hung
    beat = watchdog._heartbeat(where=False)
    assert (beat["rank"], beat["phase"], beat["step"], beat["count"]) == (3, "save", 7, 1)


def test_ticks_are_as_rare_as_there_are_ranks() -> None:
    pulse = Pulse(Limits(1, 1, 1))
    assert [Watchdog(pulse, 0, n).tick_s for n in (1, 64, 65, 1024)] == [1, 1, 2, 16]


def test_what_a_hang_breaks_on_its_way_is_recorded_as_the_hang(tmp_path: Path) -> None:
    """Another rank ended first: this one's collective fails before its watchdog ends it."""
    folder = RunFolder(tmp_path / "run")
    folder.open()
    watchdog, state = SimpleNamespace(hung=True), TrainState(step=7)
    run: Any = SimpleNamespace(watchdog=watchdog, is_writer=True, folder=folder, state=state)
    Run.ended(cast(Run, run), "failed", 1)
    status = json.loads(folder.status_path.read_text())
    assert (status["outcome"], status["code"], status["step"]) == ("failed", 78, 7)
