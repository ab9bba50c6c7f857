"""Losses that end a run or roll it back; tests/faults/test_steps.py plants some in real runs."""

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from harness.config.sections import EvalConfig, GuardConfig
from harness.errors import ExitCode
from harness.guard.stability import Next, SpikeDetector, StabilityMonitor
from tests.tables import beside


def monitor(**evaluation: Any) -> StabilityMonitor:
    return StabilityMonitor(GuardConfig(max_bad_steps=3, spike_window=8), EvalConfig(**evaluation))


def kind(monitor: StabilityMonitor, step: int = 9, is_last: bool = False) -> Next:
    return monitor.verdict(step, is_last, "runs/x").next


def test_consecutive_bad_steps_are_divergence() -> None:
    seen = monitor()
    seen.see_step(2.0, 1.0)
    seen.see_evaluation(2.0, 5)
    for good in (False, False, True, False, False):
        seen.see_applied() if good else seen.see_skipped("the loss is not finite", is_bad=True)
    for _ in range(20):
        seen.see_skipped("fp16 overflowed", is_bad=False)  # it looks for its scale
    assert kind(seen) is Next.GO_ON
    seen.see_skipped("the loss is not finite (loss nan, norm 1)", is_bad=True)
    verdict = seen.verdict(9, False, "runs/x")
    assert (verdict.next, verdict.code) == (Next.STOP, ExitCode.DIVERGED)
    for text in ("3 steps in a row", "loss nan", "those of step 6"):
        assert text in verdict.message


def test_nonfinite_held_out_loss_after_step_0_is_divergence() -> None:
    seen = monitor()
    seen.see_evaluation(math.nan, 0)
    assert kind(seen, 0) is Next.GO_ON
    seen.see_evaluation(math.nan, 5)
    assert seen.verdict(5, False, "").code == ExitCode.DIVERGED


def test_patience_ends_a_run_early_but_not_at_its_last_step() -> None:
    seen = monitor(patience=2, better_by=0.1)
    for step, loss in enumerate((3.0, 2.95, 2.8, 2.75, 2.75)):
        assert kind(seen) is Next.GO_ON
        seen.see_evaluation(loss, step)
    assert (kind(seen), kind(seen, is_last=True)) == (Next.END_EARLY, Next.GO_ON)
    assert seen.best == (2, 2.8)


def test_a_restored_monitor_comes_to_the_same_verdicts() -> None:
    seen, fresh = monitor(patience=2), monitor(patience=2)
    for step in range(12):
        seen.see_step(2.0 + step % 2, 1.0)
    seen.see_skipped("x", is_bad=True)
    for step in (3, 4):
        seen.see_evaluation(1.0, step)
    assert seen.see_step(99.0, 1.0) is not None
    seen.rollbacks = 1
    saved = json.loads(json.dumps(seen.state()))
    fresh.restore(saved)
    assert (fresh.state(), fresh.rollbacks) == (seen.state(), 1)
    assert fresh.see_step(99.0, 1.0) == seen.see_step(99.0, 1.0) is not None
    fresh.ask_to_go_back("a spike of loss")
    assert fresh.verdict(9, False, "").message == "a spike of loss"
    fresh.restore(saved)
    fresh.see_evaluation(1.0, 5)
    assert kind(fresh) is Next.END_EARLY
    fresh.restore({})  # from a run without one
    assert kind(fresh) is Next.GO_ON


Curve = list[tuple[float, float]]


def curve(steps: int, seed: int = 0) -> Curve:
    """Return losses that fall by a power law with noise, and norms with outliers."""
    draw, values = random.Random(seed), []
    for step in range(10, steps + 10):
        loss = 2.0 + 9.0 * step**-0.3 + draw.gauss(0, 0.03)
        values.append((loss, (1.5 * step**-0.1) * math.exp(draw.gauss(0, 0.3))))
    return values


def spikes(detector: SpikeDetector, steps: Curve) -> Iterator[tuple[int, str]]:
    for number, (loss, norm) in enumerate(steps):
        seen = detector.see(loss, norm)
        if seen is not None:
            yield number, seen.quantity


@pytest.mark.gate("faults")
def test_a_long_noisy_falling_curve_has_no_spikes() -> None:
    for seed in range(3):
        assert list(spikes(SpikeDetector(6.0, 128), curve(30_000, seed))) == []


@pytest.mark.parametrize(("planted", "quantity"), beside(__file__, "stability.toml")["spikes"])
def test_planted_spikes_are_the_only_ones(planted: dict[str, list[float]], quantity: str) -> None:
    steps = curve(2_000)
    for at, factors in planted.items():
        loss, norm = steps[int(at)]
        steps[int(at)] = loss * factors[0], norm * factors[1]
    expected = [(int(at), quantity) for at in planted if quantity]
    assert list(spikes(SpikeDetector(6.0, 128), steps)) == expected


def test_sigma_is_the_sample_standard_deviation() -> None:
    detector = SpikeDetector(6.0, 8)
    assert [detector.see(loss, 1.0) for loss in (1.0, 2.0)] == [None, None]
    seen = detector.see(99.0, 1.0)
    assert seen is not None
    assert (seen.mean, seen.sigma) == (1.5, pytest.approx(0.5**0.5))


def test_neither_rounding_nor_the_first_values_are_spikes() -> None:
    """Before a quarter of the window, nothing is said."""
    rounded = [(2.0, 1.0)] * 100 + [(2.0000001, 1.0000001)]
    for steps, spike in ((rounded, 2.02), ([*curve(31), (1e6, 1e6)], 1e12)):
        detector = SpikeDetector(6.0, 128)
        assert list(spikes(detector, steps)) == []
        assert detector.see(spike, 1.0) is not None


def test_a_new_level_is_accepted_after_a_quarter_of_a_window() -> None:
    steps = [*curve(500), *((loss + 20, norm) for loss, norm in curve(500))]
    seen = [number for number, _ in spikes(SpikeDetector(6.0, 128), steps)]
    assert seen == list(range(500, 532))


def test_nonfinite_losses_do_not_enter_the_spike_window() -> None:
    detector = SpikeDetector(6.0, 128)
    list(spikes(detector, curve(200)))
    before = detector.state()
    for value in (math.nan, math.inf):
        assert detector.see(value, 1.0) is None
        assert detector.see(1.0, value) is None
    assert detector.state() == before
