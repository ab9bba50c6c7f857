"""Steps that must change nothing, in every layout; judged from bad_step_checks.py on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.engine.deepspeed_0_19.replaced import replaced

pytestmark = pytest.mark.slow

KINDS = ("first", "nan", "inf", "loss", "spike", "no target")
Result = Callable[[str], list[Any]]


def judge(layout: str, facts: dict[str, Any]) -> None:
    for kind in KINDS:
        outcome = {key: facts[kind][key] for key in ("unchanged", "applied", "counted", "scale")}
        expected = {"unchanged": True, "applied": False, "counted": 1, "scale": 1.0}
        assert outcome == expected, (layout, kind)
        finite = kind in ("spike", "no target")
        assert (facts[kind]["norm"] in ("nan", "inf")) != finite, (layout, kind)
    assert facts["skipped"] == len(KINDS), layout
    assert facts["norms"][0] == pytest.approx(facts["norms"][1], rel=1e-5), layout
    assert facts["trains"], layout


def test_a_step_that_is_not_finite_or_a_spike_changes_no_bit_of_weights_or_moments(
    result: Result,
) -> None:
    for layouts in result("bad_steps_change_nothing"):
        assert len(layouts) == 19
        for layout, facts in layouts.items():
            judge(layout, facts)


def test_after_skipped_steps_a_run_is_bit_for_bit_the_one_that_never_met_them(
    result: Result,
) -> None:
    for layouts in result("bad_steps_change_nothing"):
        assert len(layouts) == 19
        for layout, facts in layouts.items():
            assert (facts["as_if_never"], facts["agree"]) == (True, True), layout


def test_clipping_by_value_hides_no_infinity(result: Result) -> None:
    for layouts in result("bad_steps_change_nothing_where_values_are_clipped"):
        assert len(layouts) == 4
        for layout, facts in layouts.items():
            judge(layout, facts)


def test_the_engine_can_go_on_after_the_minimum_loss_scale(result: Result) -> None:
    for layouts in result("goes_on_after_the_minimum_loss_scale"):
        assert layouts == {number: [True, True, True] for number in "123"}


def test_one_flipped_bit_names_the_weight_and_where_nobody_holds_a_copy_there_is_none(
    result: Result,
) -> None:
    for layouts in result("flipped_bit_is_found"):
        for layout, (compared, equal, differ) in layouts.items():
            assert equal == {}, layout
            # A stage has one data rank here: no replicas.
            silent = layout in ("zero3-fp32", "pipeline1-fp32")
            assert list(differ.values()) == ([] if silent else [[0, 1]]), layout
            assert (compared == 0) == silent, layout


def test_weights_that_are_still_being_gathered_are_not_compared(result: Result) -> None:
    for counts in result("weights_in_flight_are_not_compared"):
        assert counts["gathered"] > 0
        assert counts["compared"] == 0


def test_what_is_replaced_comes_back() -> None:
    class Thing:
        def step(self) -> str:
            return "own"

    thing = Thing()
    for _ in range(2):
        with replaced(thing, "step", lambda: "other"), replaced(thing, "new", 1):
            assert (thing.step(), thing.new) == ("other", 1)  # type: ignore[attr-defined]
        assert vars(thing) == {}
        assert thing.step() == "own"
    vars(thing)["new"] = 0
    with replaced(thing, "new", 1):
        pass
    assert vars(thing) == {"new": 0}
