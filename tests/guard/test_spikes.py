"""Losses that count as spikes; tests/faults/test_steps.py plants some in real runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator

import pytest

from harness.guard.judge import SpikeDetector

Curve = list[tuple[float, float]]


def curve(steps: int, seed: int = 0) -> Curve:
    """A loss that falls by a power law with noise; norms that fall with it, far values included."""
    draw = random.Random(seed)
    return [
        (
            2.0 + 9.0 * (step + 10) ** -0.3 + draw.gauss(0, 0.03),
            (1.5 * (step + 10) ** -0.1) * math.exp(draw.gauss(0, 0.3)),
        )
        for step in range(steps)
    ]


def spikes(detector: SpikeDetector, steps: Curve) -> Iterator[tuple[int, str]]:
    for number, (loss, norm) in enumerate(steps):
        seen = detector.see(loss, norm)
        if seen is not None:
            yield number, seen.of


@pytest.mark.gate("faults")
def test_a_long_noisy_falling_curve_has_no_spikes() -> None:
    for seed in range(3):
        assert list(spikes(SpikeDetector(6.0, 128), curve(30_000, seed))) == []


@pytest.mark.parametrize(
    ("at", "loss_factor", "norm_factor", "of"),
    [(500, 1.5, 1.0, "loss"), (500, 1.0, 20.0, "log_grad_norm"), (33, 3.0, 1.0, "loss")],
)
def test_a_planted_spike_is_the_only_one(
    at: int, loss_factor: float, norm_factor: float, of: str
) -> None:
    steps = curve(2_000)
    steps[at] = steps[at][0] * loss_factor, steps[at][1] * norm_factor
    assert list(spikes(SpikeDetector(6.0, 128), steps)) == [(at, of)]


def test_what_falls_is_no_spike() -> None:
    steps = curve(1_000)
    steps[500] = 0.01, 1e-6
    assert list(spikes(SpikeDetector(6.0, 128), steps)) == []


def test_a_spike_does_not_hide_the_next() -> None:
    steps = curve(1_000)
    for number, loss in ((500, 300.0), (501, 6.0), (505, 6.0)):
        steps[number] = loss, steps[number][1]
    seen = list(spikes(SpikeDetector(6.0, 128), steps))
    assert seen == [(number, "loss") for number in (500, 501, 505)]


def test_before_a_quarter_of_the_window_nothing_is_said() -> None:
    detector = SpikeDetector(6.0, 128)
    steps = [*curve(31), (1e6, 1e6)]
    assert list(spikes(detector, steps)) == []
    assert detector.see(1e12, 1.0) is not None


def test_a_new_level_is_accepted_after_a_quarter_of_a_window() -> None:
    steps = [*curve(500), *((loss + 20, norm) for loss, norm in curve(500))]
    seen = [number for number, _ in spikes(SpikeDetector(6.0, 128), steps)]
    assert seen == list(range(500, 532))


def test_what_is_not_finite_is_neither_judged_nor_remembered() -> None:
    detector = SpikeDetector(6.0, 128)
    list(spikes(detector, curve(200)))
    before = detector.state()
    for value in (math.nan, math.inf):
        assert detector.see(value, 1.0) is None
        assert detector.see(1.0, value) is None
    assert detector.state() == before


def test_rounding_of_a_constant_is_no_spike() -> None:
    detector = SpikeDetector(6.0, 128)
    assert list(spikes(detector, [(2.0, 1.0)] * 100 + [(2.0000001, 1.0000001)])) == []
    assert detector.see(2.02, 1.0) is not None


def test_a_state_that_was_written_as_json_judges_alike() -> None:
    steps = curve(400)
    steps[250] = 30.0, 1.0
    first, second = SpikeDetector(6.0, 128), SpikeDetector(6.0, 128)
    list(spikes(first, steps[:200]))
    second.restore(json.loads(json.dumps(first.state())))
    assert list(spikes(first, steps[200:])) == list(spikes(second, steps[200:])) == [(50, "loss")]
    assert first.state() == second.state()
