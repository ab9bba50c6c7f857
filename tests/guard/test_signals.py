"""Signals and time limits stop one process; tests/faults/test_saves.py stops several ranks."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from harness.errors import ExitCode, RunStopped
from harness.guard import signals as module
from harness.guard.signals import StopGuard, groups_of
from harness.guard.stop_request import STOP_SIGNALS, StopAsked, StopRequest
from harness.guard.time_left import TimeLeft, as_seconds, slurm_seconds_left
from tests.ranks import ranks
from tests.real_runs import REPOSITORY
from tests.tables import beside
from tests.tiers import rest_in_gate

TABLES = beside(__file__, "signals.toml")


def name_of(number: signal.Signals) -> str:
    return "Ctrl-C" if number == signal.SIGINT else number.name


@pytest.fixture
def guard() -> Iterator[StopGuard]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may be under nohup
    with contextlib.closing(StopGuard(1)) as guard:
        yield guard
    signal.signal(signal.SIGHUP, before)


@ranks(6)
def test_many_ranks_agree_in_rows_and_columns() -> None:
    """In two rows of three, it takes two steps until all know; rank 4 is asked in its fourth."""
    rank, answers = dist.get_rank(), list[tuple[bool, bool, bool]]()
    with mock.patch.object(module, "_TOGETHER", 1):
        guard = StopGuard(6)
    assert guard.delay == 2
    for step in range(7):
        if (rank, step) == (4, 3):
            guard.request.ask("a test")
        answers.append(guard.agree(written=step > 0 or rank != 5, is_over=(rank, step) == (0, 4)))
    written = [(False, False, False)] * 3 + [(False, True, False)] * 2
    assert answers == [*written, (True, True, False), (True, True, True)]
    with pytest.raises(RunStopped) as stopped:
        guard.stop_if_asked()
    assert stopped.value.code == ExitCode.STOPPED
    assert guard.told_by_rank_0(f"from {rank}") == "from 0"
    guard.close()


@pytest.mark.parametrize(("count", "most"), [(1, 0), (64, 64), (100, 20), (1000, 65), (16384, 256)])
def test_a_rank_is_connected_to_few_of_many(count: int, most: int) -> None:
    """Everything that a row agrees on reaches every column."""
    for rank in (0, count // 3, count - 1):
        groups = groups_of(rank, count)
        assert all(rank in group for group in groups)
        assert sum(map(len, groups)) <= most
        assert math.prod(map(len, groups)) == count
    assert groups_of(5, 67) == [[*range(67)]]  # a prime number has only one row


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_becomes_a_stop_request(number: signal.Signals, guard: StopGuard) -> None:
    assert guard.agree() == (False, False, False)
    guard.stop_if_asked()
    os.kill(os.getpid(), number)
    assert guard.agree() == (True, False, False)
    assert guard.agree(written=True, is_over=True) == (True, True, True)
    assert guard.request.received == name_of(number)
    with pytest.raises(RunStopped, match=f"asked to stop by {name_of(number)}"):
        guard.stop_if_asked()


def test_a_closed_guard_has_given_the_signals_back() -> None:
    before = [*map(signal.getsignal, STOP_SIGNALS)]
    guard = StopGuard(1)
    assert [*map(signal.getsignal, STOP_SIGNALS)] != before
    guard.close()
    guard.close()
    assert [*map(signal.getsignal, STOP_SIGNALS)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_request_breaks_off_what_may_be_broken_off() -> None:
    with contextlib.closing(StopRequest()) as request:
        with pytest.raises(StopAsked), request.breaks_off():
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)  # outside the body it is only recorded
        with pytest.raises(StopAsked), request.breaks_off():
            pytest.fail("it was asked before")


def test_what_ignores_sighup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with contextlib.closing(StopRequest()) as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("then", "names", "code"), rest_in_gate("faults", TABLES["ends"], 3))
def test_a_start_ends_on_second_ctrl_c_or_lost_rank(then: str, names: list[str], code: int) -> None:
    numbers = [signal.Signals[name] for name in names]
    command, pipe = [sys.executable, "-c", TABLES["waits"].format(then)], subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "waits\n"
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)
        output = process.stdout.read()
        assert process.wait() == code
        assert output == ("" if code else f"{name_of(numbers[0])}\n")


@pytest.mark.parametrize(("text", "seconds"), TABLES["texts"])
def test_slurm_end_time_is_parsed(text: str, seconds: float | None) -> None:
    assert as_seconds(text) == seconds


def test_the_end_of_the_process_takes_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    left = TimeLeft(600, save_bytes=6e9)
    assert left.first_save_s == 120
    now[0] = 1600 - 130 - 15
    assert not left.is_short_of(130)
    now[0] += 1
    assert left.is_short_of(130)
    assert not left.is_short_of(129)
    assert not TimeLeft(None, 1).is_short_of(1e9)


@pytest.mark.parametrize(("job", "squeue", "left"), TABLES["left"])
def test_newer_slurm_says_when_the_job_ends_and_older_is_asked(
    job: dict[str, str],
    squeue: str,
    left: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert slurm_seconds_left(job) == left
