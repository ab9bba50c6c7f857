"""Losses that end a run or roll it back; tests/faults/test_steps.py plants some in real runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from harness.config.sections import EvalConfig, GuardConfig
from harness.errors import ExitCode
from harness.guard.stability import Patience, SpikeDetector, StabilityMonitor


def monitor(**evaluation: Any) -> StabilityMonitor:
    return StabilityMonitor(GuardConfig(max_bad_steps=3, spike_window=8), EvalConfig(**evaluation))


def kind(monitor: StabilityMonitor, step: int = 9, is_last: bool = False) -> str:
    return monitor.verdict(step, is_last, "runs/x").kind


def test_a_run_in_which_nothing_happens_goes_on() -> None:
    seen = monitor()
    seen.see_step(2.0, 1.0)
    seen.see_applied()
    seen.see_evaluation(2.0, 5)
    assert kind(seen) == "go on"


def test_bad_steps_in_a_row_are_divergence_and_a_good_one_between_is_not() -> None:
    seen = monitor()
    for good in (False, False, True, False, False):
        seen.see_applied() if good else seen.see_skipped("the loss is not finite", is_bad=True)
    assert kind(seen) == "go on"
    seen.see_skipped("the loss is not finite (loss nan, norm 1)", is_bad=True)
    verdict = seen.verdict(9, False, "runs/x")
    assert (verdict.kind, verdict.code) == ("stop", ExitCode.DIVERGED)
    assert "3 steps in a row" in verdict.message
    assert "loss nan" in verdict.message
    assert "those of step 6" in verdict.message


def test_steps_in_which_fp16_looks_for_its_scale_do_not_count() -> None:
    seen = monitor()
    for _ in range(20):
        seen.see_skipped("fp16 overflowed", is_bad=False)
    assert kind(seen) == "go on"


def test_a_held_out_loss_that_is_no_number_is_divergence_after_step_0() -> None:
    seen = monitor()
    seen.see_evaluation(math.nan, 0)
    assert kind(seen, 0) == "go on"
    seen.see_evaluation(math.nan, 5)
    assert seen.verdict(5, False, "").code == ExitCode.DIVERGED


def test_patience_ends_a_run_early_but_not_at_its_last_step() -> None:
    seen = monitor(patience=2)
    for step, loss in enumerate((3.0, 2.0, 2.5, 2.4)):
        seen.see_evaluation(loss, step)
    assert (kind(seen), kind(seen, is_last=True)) == ("end early", "go on")
    assert seen.best == (1, 2.0)


def test_a_rollback_is_asked_for_once() -> None:
    seen = monitor()
    saved = seen.state()
    seen.ask_to_go_back("a spike of loss")
    assert seen.verdict(9, False, "").message == "a spike of loss"
    seen.restore(saved)
    assert kind(seen) == "go on"


def test_a_restored_monitor_comes_to_the_same_verdicts() -> None:
    seen, fresh = monitor(patience=2), monitor(patience=2)
    for step in range(12):
        seen.see_step(2.0 + step % 2, 1.0)
    seen.see_skipped("x", is_bad=True)
    seen.see_evaluation(1.0, 3)
    fresh.restore(seen.state())
    assert fresh.state() == seen.state()
    assert fresh.see_step(99.0, 1.0) == seen.see_step(99.0, 1.0) is not None


def test_it_is_over_after_so_many_evaluations_without_a_better_one() -> None:
    patience = Patience(2, least=0.1)
    seen = []
    for step, loss in enumerate([3.0, 2.95, 2.8, 2.75, 2.75]):
        patience.see(loss, step)
        seen.append(patience.is_over)
    assert seen == [False, False, False, False, True]
    assert (patience.best, patience.best_step) == (2.8, 2)


def test_it_survives_a_checkpoint() -> None:
    patience, again = Patience(2, 0.0), Patience(2, 0.0)
    patience.see(2.0, 1)
    patience.see(3.0, 2)
    again.restore(patience.state())
    again.see(3.0, 3)
    assert again.is_over
    again.restore({})  # from a run without one
    assert not again.is_over


Curve = list[tuple[float, float]]


def curve(steps: int, seed: int = 0) -> Curve:
    """Return a loss that falls by a power law with noise, and norms that fall with it, with
    outliers.
    """
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
            yield number, seen.quantity


@pytest.mark.gate("faults")
def test_a_long_noisy_falling_curve_has_no_spikes() -> None:
    for seed in range(3):
        assert list(spikes(SpikeDetector(6.0, 128), curve(30_000, seed))) == []


@pytest.mark.parametrize(
    ("at", "loss_factor", "norm_factor", "quantity"),
    [(500, 1.5, 1.0, "loss"), (500, 1.0, 20.0, "log_grad_norm"), (33, 3.0, 1.0, "loss")],
)
def test_a_planted_spike_is_the_only_one(
    at: int, loss_factor: float, norm_factor: float, quantity: str
) -> None:
    steps = curve(2_000)
    steps[at] = steps[at][0] * loss_factor, steps[at][1] * norm_factor
    assert list(spikes(SpikeDetector(6.0, 128), steps)) == [(at, quantity)]


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
