"""A vocabulary that does not divide stays whole, and the plan says at what cost."""

from __future__ import annotations

from typing import Any

from harness.config.run_config import RunConfig
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.plan.text import summary

VOCABULARY, WIDTH = 50_257, 768


def plan(tensor: int = 2, **overrides: Any) -> Plan:
    model = {"name": "gpt2-124m", "overrides": overrides}
    run = RunConfig.model_validate({"model": model, "train": {"global_batch": 8}})
    ds = {"tensor_parallel": {"autotp_size": tensor}, "zero_optimization": {"stage": 0}}
    return make_plan(run, ds, World(0, 2, 0, 2, "torch", "cpu", ""))


def test_a_whole_vocabulary_is_an_event_and_a_note_with_its_bytes_and_the_next_size() -> None:
    made = plan()
    (event,) = made.events
    assert event["kind"] == "whole_vocabulary"
    assert "a vocabulary of 50,257 cannot be divided over 2" in event["message"]
    assert "model.overrides.vocab_size=50258 can" in event["message"]
    # The tied embedding and head: half of the rows, but for the one that is added.
    assert f"{(VOCABULARY // 2) * WIDTH:,} parameters more" in event["message"]
    assert f"note           {event['message']}" in summary(made)


def test_its_bytes_are_those_that_the_next_size_saves() -> None:
    whole, divided = plan(), plan(vocab_size=VOCABULARY + 1)
    assert divided.events == ()
    assert whole.estimate is not None
    assert divided.estimate is not None
    saved = whole.estimate.worst.peak - divided.estimate.worst.peak
    assert whole.events[0]["bytes"] == saved
    assert saved > 4 * 4 * (VOCABULARY // 2) * WIDTH  # weights, gradients and both moments in fp32


def test_without_tensor_ranks_nothing_is_said() -> None:
    assert plan(tensor=1).events == ()
