"""Signals as stop decisions of one process; tests/test_run.py stops several ranks."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from harness.guard.signals import STOP_SIGNALS, StopGuard


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_becomes_a_stop_request(number: signal.Signals) -> None:
    with contextlib.closing(StopGuard(1)) as guard:
        assert guard.agree() == (False, False)
        os.kill(os.getpid(), number)
        assert guard.agree() == (True, False)
        assert guard.agree(written=True) == (True, True)
        assert guard.received == number.name


def test_a_closed_guard_has_given_the_signals_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    StopGuard(1).close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
