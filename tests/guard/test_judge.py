from __future__ import annotations

import math
from typing import Any

from harness.config.conduct_sections import EvalConfig, GuardConfig
from harness.errors import ExitCode
from harness.guard.judge import Judge


def judge(**evaluation: Any) -> Judge:
    return Judge(GuardConfig(max_bad_steps=3, spike_window=8), EvalConfig(**evaluation))


def kind(judge: Judge, step: int = 9, is_last: bool = False) -> str:
    return judge.verdict(step, is_last, "runs/x").kind


def test_a_run_in_which_nothing_happens_goes_on() -> None:
    seen = judge()
    seen.see_step(2.0, 1.0)
    seen.see_applied()
    seen.see_evaluation(2.0, 5)
    assert kind(seen) == "go on"


def test_bad_steps_in_a_row_are_divergence_and_a_good_one_between_is_not() -> None:
    seen = judge()
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
    seen = judge()
    for _ in range(20):
        seen.see_skipped("fp16 overflowed", is_bad=False)
    assert kind(seen) == "go on"


def test_a_held_out_loss_that_is_no_number_is_divergence_after_step_0() -> None:
    seen = judge()
    seen.see_evaluation(math.nan, 0)
    assert kind(seen, 0) == "go on"
    seen.see_evaluation(math.nan, 5)
    assert seen.verdict(5, False, "").code == ExitCode.DIVERGED


def test_patience_ends_a_run_early_but_not_at_its_last_step() -> None:
    seen = judge(patience=2)
    for step, loss in enumerate((3.0, 2.0, 2.5, 2.4)):
        seen.see_evaluation(loss, step)
    assert (kind(seen), kind(seen, is_last=True)) == ("end early", "go on")
    assert seen.best == (1, 2.0)


def test_a_rollback_is_asked_for_once() -> None:
    seen = judge()
    saved = seen.state()
    seen.ask_to_go_back("a spike of loss")
    assert seen.verdict(9, False, "").message == "a spike of loss"
    seen.restore(saved)
    assert kind(seen) == "go on"


def test_a_restored_judge_comes_to_the_same_verdicts() -> None:
    seen, fresh = judge(patience=2), judge(patience=2)
    for step in range(12):
        seen.see_step(2.0 + step % 2, 1.0)
    seen.see_skipped("x", is_bad=True)
    seen.see_evaluation(1.0, 3)
    fresh.restore(seen.state())
    assert fresh.state() == seen.state()
    assert fresh.see_step(99.0, 1.0) == seen.see_step(99.0, 1.0) is not None
