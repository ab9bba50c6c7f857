"""Limits, heartbeats and reports; tests/faults/test_stops.py tests real hangs."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from harness.checkpoint.manifest import TrainState
from harness.config.run_config import RunConfig
from harness.errors import ExitCode
from harness.guard import failure_broadcast
from harness.guard import watchdog as module
from harness.guard.failure_broadcast import Failure, FailureBroadcast
from harness.guard.watchdog import Pulse, Watchdog, hang_report, place_of
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.run.build import _start_watchdog
from harness.run.ending import hangs
from harness.runfolder import RunFolder
from tests.real_runs import REPOSITORY, wait_for
from tests.tables import beside

TABLES = beside(__file__, "watchdog.toml")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_limits_are_learned_from_the_longest_of_the_last_times(clock: list[float]) -> None:
    pulse = Pulse(floor_s=30, factor=10, first_s=600)
    assert pulse.limit_s("set-up") == 600
    for seconds in (40, 2, 3):  # the first one compiles
        assert pulse.limit_s("step") == 600
        pulse("step", 1)
        clock[0] += seconds
        pulse("save", 1)
    assert pulse.limit_s("step") == 400
    assert pulse.longest_s("step") == 40
    for _ in range(32):
        pulse("step", 2)
        clock[0] += 2
        pulse("data", 3)
    assert pulse.limit_s("step") == 30  # the minimum; the first value is discarded
    assert pulse.limit_s("save") == 30
    assert pulse.longest_s("load") is None


def test_ranks_that_share_a_gpu_hang_later() -> None:
    run = RunConfig.model_validate({"guard": {"hang_floor_s": 10}})
    pulse, watchdog = _start_watchdog(make_plan(run, {}, World(ranks_per_gpu=4)))
    watchdog.close()
    for _ in range(4):
        pulse("step", 1)
    assert pulse.limit_s("step") == 40


def test_watchdog_counts_every_heartbeat(clock: list[float]) -> None:
    pulse = Pulse(floor_s=1, factor=1, first_s=1)
    before = pulse.beat
    clock[0] = 5
    pulse("evaluation", 7)
    pulse("evaluation", 7)
    assert (before.phase, before.count) == ("set-up", 0)
    assert (pulse.beat.phase, pulse.beat.step, pulse.beat.count) == ("evaluation", 7, 2)
    assert pulse.beat.since == 5


def test_a_rank_writes_where_it_is_and_takes_that_away(tmp_path: Path) -> None:
    pulse = Pulse(floor_s=60, factor=10, first_s=60)
    watchdog = Watchdog(pulse, rank=3, world_size=4)
    watchdog.tick_s = 0.05
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    watchdog.write_to(folder, folder / "hang.json", lambda report: None)
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


def test_heartbeat_during_a_hang_keeps_its_place(tmp_path: Path) -> None:
    """A rank that notices the hang itself may write once more before it sees the report."""
    watchdog = Watchdog(Pulse(floor_s=60, factor=10, first_s=60), rank=0, world_size=1)
    watchdog.write_to(tmp_path, tmp_path / "hang.json", lambda report: None)
    watchdog.hung = True
    watchdog.tick()
    assert json.loads((tmp_path / "rank-00000.json").read_text())["at"]


def test_a_hang_is_noticed_while_the_file_system_hangs_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TABLES["scripts"]["writes_nowhere"], str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == ExitCode.HANG
    assert "rank 0: no progress for 0 s (limit: 0 s); its threads:" in done.stderr


def test_a_heartbeat_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    """A rank may be stopped during a write: then the previous heartbeat names it."""
    watchdog = Watchdog(Pulse(floor_s=1, factor=1, first_s=1), rank=0, world_size=1)
    watchdog.write_to(tmp_path, tmp_path / "hang.json", lambda report: None)

    is_enough = threading.Event()

    def write() -> None:
        while not is_enough.is_set():
            for watchdog.hung in (True, False):
                watchdog._write()

    reader = Watchdog(Pulse(floor_s=1, factor=1, first_s=1), rank=1, world_size=2)
    reader.folder = tmp_path
    writer = threading.Thread(target=write)
    writer.start()
    try:
        ticks = set[int]()
        while len(ticks) < 100:  # each read during the writes
            (heartbeat, _) = reader.all_ranks()
            assert "tick" in heartbeat, "torn"
            ticks.add(heartbeat["tick"])
            time.sleep(1e-4)  # otherwise the interpreter lets the writer run every 5 ms only
    finally:
        is_enough.set()
        writer.join()


def test_hang_of_an_earlier_attempt_ends_no_other_rank(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open()
    pulse = Pulse(floor_s=60, factor=10, first_s=60)
    old, new, other = (Watchdog(pulse, rank, world_size=2) for rank in (1, 0, 1))
    for watchdog, attempt in ((old, 1), (new, 2), (other, 2)):
        path = folder.hang_path(attempt)
        watchdog.write_to(folder.heartbeats_dir, path, lambda report: None)
    assert old._reports()
    assert not new.tick()
    assert new._reports()
    assert other.tick()
    assert not other._reports()
    folder.close()


def test_ticks_are_as_rare_as_there_are_ranks() -> None:
    pulse = Pulse(floor_s=1, factor=1, first_s=1)
    ranks = (1, 8, 16, 40, 64, 320, 1024)
    assert [Watchdog(pulse, 0, n).tick_s for n in ranks] == [1, 1, 2, 5, 5, 5, 16]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_reports_a_hang_says_so_in_the_status(rank: int, tmp_path: Path) -> None:
    """Rank 0, which usually writes it, may be the one that hangs."""
    writer, folder = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    writer.open()
    folder.attempt = writer.attempt
    plan, state = SimpleNamespace(world=SimpleNamespace(rank=rank)), TrainState(step=7)
    run: Any = SimpleNamespace(plan=plan, is_writer=rank == 0, folder=folder, state=state)
    run.pages = SimpleNamespace(finish=lambda patience_s: None)
    told: list[tuple[Any, ...]] = []
    run.notifier = SimpleNamespace(tell=lambda *words: told.append(words), close=lambda: None)
    hangs(run, {"message": "hang: rank 0"})
    assert told == [("hang", 78, "hang: rank 0")]
    status = folder.read_status() or {}
    assert (status["outcome"], status["code"], status["step"]) == ("failed", 78, 7)
    assert status["message"] == "hang: rank 0"
    assert [event["attempt"] for event in folder.read_events()] == [1]


def heartbeat(rank: int, count: int, tick: int, **more: Any) -> dict[str, Any]:
    found = {"rank": rank, "host": f"n{rank}", "pid": 10 + rank, "phase": "step", "step": 5}
    return {**found, "count": count, "seconds": 30.0, "tick": tick, **more}


def test_the_rank_that_reports_is_not_silent() -> None:
    own = [heartbeat(0, 9, 4)]  # its file may be older than its report
    assert hang_report(own, own, "why", 0, lambda rank: "")["silent"] == []


def test_silent_processes_of_other_hosts_are_gone(tmp_path, monkeypatch) -> None:
    watchdog = Watchdog(Pulse(floor_s=60, factor=10, first_s=60), rank=0, world_size=2)
    watchdog.folder, other = tmp_path, tmp_path / "rank-00001.json"
    pid = 1 << 30  # of no process of this host
    for tick, gone in ((6, []), (5, [1])):
        other.write_text(json.dumps(heartbeat(1, 9, 5, pid=pid)))
        text = json.dumps(heartbeat(1, 9, tick, pid=pid))
        monkeypatch.setattr(module.time, "sleep", lambda s, text=text: other.write_text(text))
        assert [beat["rank"] for beat in watchdog.gone()] == gone


@pytest.mark.parametrize("name", TABLES["reports"])
def test_the_ranks_that_hold_up_the_others_are_named(name: str) -> None:
    after, silent, behind, text = TABLES["reports"][name]
    before = [{**beat, "tick": 4} if "tick" in beat else beat for beat in after]
    if name == "wrote before":
        before[1] = heartbeat(1, 9, 4)
    report = hang_report(before, after, "why", 0, lambda rank: f" (data {rank})")
    assert (report["silent"], report["behind"]) == (silent, behind)
    assert report["held_up_by"] == silent + behind
    assert text in report["message"]
    waiting = len(after) - len(silent + behind)
    place = f"{waiting} ranks (0-{waiting - 1})" if waiting > 1 else "1 ranks (0)"
    assert f"{place} in 'step' of step 5, x" in report["message"]


def test_hang_place_is_innermost_library_line_and_wait() -> None:
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


def test_all_ranks_exit_with_the_code_of_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []

    def exit_thread(code: int) -> None:
        codes.append(code)
        sys.exit(code)

    monkeypatch.setattr(failure_broadcast, "exit_now", exit_thread)
    store = HashStore()
    ranks = [FailureBroadcast(store, rank, world_size=3) for rank in range(3)]
    for rank in ranks:
        rank.start()
    with pytest.raises(SystemExit):
        ranks[1].end(Failure(1, 70, "the disk is full"), report=lambda _: None)
    for rank in ranks:
        rank.join(60)
    assert codes == [70, 70, 70]
    assert [rank.first.rank for rank in ranks if rank.first] == [1, 1, 1]
    assert store.add(failure_broadcast._ENDING, 0) == 3, "each rank once, the failed one last"
