"""Signals as stop decisions of one process; tests/test_loop.py stops several ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from harness.errors import RunStopped
from harness.guard.signals import StopGuard
from harness.guard.stop_request import STOP_SIGNALS, StopAsked, StopRequest
from tests.two_ranks import REPOSITORY

# It waits where Python runs no handler, as a rank does that waits for the others to join.
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


def name_of(number: signal.Signals) -> str:
    return "Ctrl-C" if number == signal.SIGINT else number.name


@pytest.fixture
def guard() -> Iterator[StopGuard]:
    with contextlib.closing(StopGuard(1)) as guard:
        yield guard


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
        os.kill(os.getpid(), signal.SIGUSR1)  # outside it is noted alone
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
    [
        ("", [signal.SIGTERM], 0),
        ("", [signal.SIGUSR1, signal.SIGUSR1], 0),
        ("", [signal.SIGINT, signal.SIGINT], 75),
        ("", [signal.SIGINT, signal.SIGTERM], 75),
        ("request.trains()", [signal.SIGINT, signal.SIGINT], 0),
        ("waiting = request.joins(); waiting.__enter__()", [signal.SIGTERM], 75),
        ("waiting = request.joins(); waiting.__enter__()", [signal.SIGUSR1], 0),
    ],
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
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)
        output = process.stdout.read()
        assert process.wait() == code
        assert output == ("" if code else f"{name_of(numbers[0])}\n")
