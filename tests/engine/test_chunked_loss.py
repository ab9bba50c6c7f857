"""The loss in chunks in the real engine: as many gathers as without, evaluations, fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Result = Callable[[str], list[Any]]


def test_zero_3_gathers_the_head_no_more_often(result: Result) -> None:
    for gathers in result("chunked_gathers"):
        assert 0 < gathers["24"] <= gathers["0"]


def test_evaluations_between_steps_are_those_of_all_logits(result: Result) -> None:
    for values in result("chunked_evaluation"):
        assert values["24"] == pytest.approx(values["0"], rel=1e-5)


def test_a_model_without_chunks_trains_with_an_event(result: Result) -> None:
    for values in result("chunks_of_no_family"):
        assert values["losses"][1] < values["losses"][0]
        (event,) = (event for event in values["events"] if event["kind"] == "loss_not_chunked")
        assert "model.loss_chunk" in event["message"]
        assert "the logits of Some are not those of its output head" in event["message"]
