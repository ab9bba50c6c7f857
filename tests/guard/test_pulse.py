"""Time limits of phases."""

from __future__ import annotations

import pytest

from harness.guard import watchdog as module
from harness.guard.watchdog import Limits, Pulse


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_limits_are_learned_from_the_longest_of_the_last_times(clock: list[float]) -> None:
    pulse = Pulse(Limits(floor_s=30, factor=10, first_s=600))
    assert pulse.limit_s("set-up") == 600
    for seconds in (40, 2, 3):  # the first compiles
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
    assert pulse.limit_s("step") == 30  # the floor; the first is forgotten
    assert pulse.limit_s("save") == 30
    assert pulse.longest_s("load") is None


def test_every_beat_counts(clock: list[float]) -> None:
    pulse = Pulse(Limits(1, 1, 1))
    before = pulse.beat
    clock[0] = 5
    pulse("evaluation", 7)
    pulse("evaluation", 7)
    assert (before.phase, before.count) == ("set-up", 0)
    assert (pulse.beat.phase, pulse.beat.step, pulse.beat.count) == ("evaluation", 7, 2)
    assert pulse.beat.since == 5
