"""Signals and time limits stop one process; tests/test_loop.py stops several ranks."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import ExitCode, RunStopped
from harness.guard import signals as module
from harness.guard.signals import StopGuard, TimeLeft, as_seconds, groups_of, slurm_seconds_left
from harness.guard.stop_request import STOP_SIGNALS, StopAsked, StopRequest
from tests.real_runs import REPOSITORY
from tests.tiers import rest_in_gate

# It waits where Python runs no handler, like a rank that waits for the others to join.
WAITS = """
import ctypes
from harness.guard import stop_request
stop_request._JOINING_S = 1.0
request = stop_request.StopRequest()
{}
print("waits", flush=True)
for _ in range(3):
    ctypes.CDLL(None).usleep(10**6)
print(request.received)
"""

# Six ranks in two rows of three, forked from one process; rank 4 is signalled in its third step.
SIX_RANKS = """
import os, sys
import torch.distributed as dist
from harness.guard import signals
signals._TOGETHER = 1

def steps(rank):
    dist.init_process_group("gloo", "file://" + sys.argv[1], rank=rank, world_size=6)
    guard, answers = signals.StopGuard(6), []
    for step in range(7):
        if (rank, step) == (4, 3):
            guard.request.ask("a test")
        answers.append(guard.agree(written=step > 0 or rank != 5))
    try:
        guard.stop_if_asked()
        answers.append("goes on")
    except Exception as error:
        answers.append(error.code)
    answers.append(guard.told_by_rank_0(f"from {rank}"))
    guard.close()
    os.write(1, f"{answers}\\n".encode())
    dist.destroy_process_group()
    os._exit(0)

children = []
for rank in range(6):
    children.append(os.fork())
    if not children[-1]:
        steps(rank)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def name_of(number: signal.Signals) -> str:
    return "Ctrl-C" if number == signal.SIGINT else number.name


@pytest.fixture
def guard() -> Iterator[StopGuard]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may be under nohup
    with contextlib.closing(StopGuard(1)) as guard:
        yield guard
    signal.signal(signal.SIGHUP, before)


def test_many_ranks_agree_in_rows_and_columns(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIX_RANKS, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    written = [(False, False)] * 3 + [(False, True)] * 2  # two steps after all had it
    answers = [*written, (True, True), (True, True), ExitCode.STOPPED, "from 0"]
    assert done.stdout.splitlines() == [str(answers)] * 6


@pytest.mark.parametrize(("ranks", "most"), [(64, 64), (100, 20), (1000, 65), (16384, 256)])
def test_a_rank_is_connected_to_few_of_many(ranks: int, most: int) -> None:
    """Everything that a row agrees on reaches every column."""
    for rank in (0, ranks // 3, ranks - 1):
        groups = groups_of(rank, ranks)
        assert all(rank in group for group in groups)
        assert sum(map(len, groups)) <= most
        assert math.prod(map(len, groups)) == ranks
    assert groups_of(0, 1) == []
    assert groups_of(5, 67) == [[*range(67)]]  # a prime number has only one row


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_becomes_a_stop_request(number: signal.Signals, guard: StopGuard) -> None:
    assert guard.agree() == (False, False)
    guard.stop_if_asked()
    os.kill(os.getpid(), number)
    assert guard.agree() == (True, False)
    assert guard.agree(written=True) == (True, True)
    assert guard.received == name_of(number)
    with pytest.raises(RunStopped, match=f"asked to stop by {name_of(number)}"):
        guard.stop_if_asked()


def test_a_closed_guard_has_given_the_signals_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    guard = StopGuard(1)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    guard.close()
    guard.close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
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


@pytest.mark.parametrize(
    ("then", "numbers", "code"),
    rest_in_gate(
        "faults",
        [
            ("", [signal.SIGTERM], 0),
            ("", [signal.SIGINT, signal.SIGINT], 75),
            ("waiting = request.joins(); waiting.__enter__()", [signal.SIGTERM], 75),
            ("", [signal.SIGUSR1, signal.SIGUSR1], 0),
            ("", [signal.SIGINT, signal.SIGTERM], 75),
            ("request.trains()", [signal.SIGINT, signal.SIGINT], 0),
            ("waiting = request.joins(); waiting.__enter__()", [signal.SIGUSR1], 0),
        ],
        3,
    ),
)
def test_a_process_that_only_starts_ends_by_the_second_ctrl_c_or_where_no_rank_comes(
    then: str, numbers: list[signal.Signals], code: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS.format(then)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "waits\n"
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)
        output = process.stdout.read()
        assert process.wait() == code
        assert output == ("" if code else f"{name_of(numbers[0])}\n")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45", 45),
        ("2:03", 123),
        ("1:00:00", 3600),
        ("2-03:00:01", 183_601),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_what_slurm_writes(text: str, seconds: float | None) -> None:
    assert as_seconds(text) == seconds


def test_the_last_step_is_the_one_after_which_another_and_a_save_would_end_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    left = TimeLeft(600, save_bytes=6e9)
    needed = 2 * 20 + 1.5 * 60 + 15
    now[0] = 1600 - needed
    assert not left.is_last_step(20, 60)
    now[0] += 1
    assert left.is_last_step(20, 60)
    assert not left.is_last_step(19, 60)
    now[0] = 1000 + 600 - 200
    assert left.is_last_step(10, None)  # a save that was never timed counts as two minutes
    assert not TimeLeft(None, 1).is_last_step(1e9, 1e9)


def test_a_process_outside_a_job_has_no_limit() -> None:
    assert slurm_seconds_left({}) is None


def test_newer_slurm_says_when_the_job_ends() -> None:
    left = slurm_seconds_left({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(time.time() + 100)})
    assert left == pytest.approx(100, abs=5)


@pytest.mark.parametrize(("output", "left"), [("echo 1:30", 90), ("exit 1", None)])
def test_older_slurm_is_asked(
    output: str, left: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n{output}\n")
    squeue.chmod(squeue.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert slurm_seconds_left({"SLURM_JOB_ID": "7"}) == left
