"""The loss in chunks of the vocabulary, as a plan decides it."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.plan.text import describe


def plan(ds: Any = None, chunk: int | None = None, **model: Any) -> Plan:
    """Llama-3-8B, unless it says otherwise, with 8,192 tokens on each of two ranks."""
    run = RunConfig.model_validate(
        {
            "model": {"name": "llama-3-8b", "loss_chunk": chunk, **model},
            "data": {"seq_len": 8192},
            "train": {"micro_batch": 1, "global_batch": 2},
        }
    )
    both = {"bf16": {"enabled": True}, **(ds or {})}
    return make_plan(run, both, World(0, 2, 0, 2, "torch", "cuda", "h100-80"), estimating=True)


def test_large_logits_are_taken_in_chunks() -> None:
    made = plan()
    assert made.loss_chunk == made.to_json()["loss_chunk"] == 8192
    assert "loss in chunks of 8,192 logits" in describe(made)
    assert plan({"tensor_parallel": {"autotp_size": 2}}).loss_chunk == 8192
    assert plan({"sequence_parallel_size": 2}).loss_chunk == 16_384  # of half as many tokens
    assert plan(chunk=100).loss_chunk == 100


def logits_and_loss_gib(chunk: int | None) -> float:
    """At the loss."""
    estimate = plan(chunk=chunk).estimate
    assert estimate is not None
    return estimate.worst.phase("loss")["logits and loss"] / 2**30


@pytest.mark.parametrize(("chunk", "vocab_size"), [(0, 128_256), (None, 32_000)])
def test_others_are_held_whole(chunk: int | None, vocab_size: int) -> None:
    made = plan(chunk=chunk, overrides={"vocab_size": vocab_size})
    assert made.loss_chunk == 0
    assert "loss in chunks" not in describe(made)


def test_a_tensor_rank_counts_its_part_of_the_vocabulary() -> None:
    """32,064 entries and 8,192 tokens are 1,002 MiB, 65,536 are 2 GiB."""
    divided = {"tensor_parallel": {"autotp_size": 2}}
    assert plan(divided, overrides={"vocab_size": 64_128}).loss_chunk == 0
    assert plan(overrides={"vocab_size": 64_128}).loss_chunk == 8192


def test_the_estimate_is_that_of_the_plan() -> None:
    by_rule, the_same, whole = (logits_and_loss_gib(chunk) for chunk in (None, 8192, 0))
    assert by_rule == the_same == pytest.approx(1.48, abs=0.01)
    assert whole == pytest.approx(11.74, abs=0.01)


def test_a_negative_chunk_is_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="loss_chunk"):
        plan(chunk=-1)
