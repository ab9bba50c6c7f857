"""Batches, ramps, lengths, chunks of a loss and carried states, as decided by a plan."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.batch import BatchSizes
from harness.layout.state_size import CARRIED
from harness.models.recurrent_state import WINDOWS
from harness.plan.text import describe, summary
from tests.plan.plans import Planner

RAMP = "ramp.batch_from=8 ramp.batch_tokens=100000"
CARRY = "RANKS=4 train.carry_state=true plan.force=true model.name=$lstm data.seq_len=16"
# Llama-3-8B, with 8,192 tokens on each of two ranks.
LARGE = (
    "RANKS=2 GPU=h100-80 ds.bf16.enabled=true model.name=llama-3-8b data.seq_len=8192 "
    "train.micro_batch=1 train.global_batch=2"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", (48, 8, 6)),
        ("RANKS=3", (48, 8, 2)),
        ("RANKS=4", (48, 6, 2)),
        ("train.global_batch=14", (14, 7, 2)),
        ("train.global_batch=13", (13, 1, 13)),
        ("train.global_batch=3", (3, 3, 1)),
        ("RANKS=8 train.global_batch=1000", (1000, 5, 25)),
        ("RANKS=2 train.global_batch=20", (20, 5, 2)),
        ("RANKS=2 train.global_batch=26", (26, 1, 13)),
        ("RANKS=2 train.micro_batch=4", (48, 4, 6)),
        ("RANKS=2 ds.train_micro_batch_size_per_gpu=2", (48, 2, 12)),
        ("RANKS=2 ds.gradient_accumulation_steps=4", (48, 6, 4)),
        ("RANKS=2 ds.train_batch_size=16 ds.gradient_accumulation_steps=2", (16, 4, 2)),
        ("RANKS=3 ds.train_micro_batch_size_per_gpu=2 ds.gradient_accumulation_steps=5",
         (30, 2, 5)),
        ("RANKS=3 ds.gradient_accumulation_steps=5 train.micro_batch=2", (30, 2, 5)),
        ("RANKS=2 ds.train_batch_size=8.0 train.micro_batch=2", (8, 2, 2)),
        # The micro-batch fits the smallest step of a ramp.
        ("RANKS=4 ramp.batch_from=12 ramp.batch_tokens=100000", (48, 3, 4)),
    ],
)  # fmt: skip
def test_batch_arithmetic(line: str, expected: tuple[int, int, int], planned: Planner) -> None:
    made = planned(line, estimate=False)
    assert (made.global_batch, made.micro_batch, made.grad_accum) == expected
    data_ranks = made.grid.data
    assert made.global_batch == made.micro_batch * made.grad_accum * data_ranks
    assert made.deepspeed["train_batch_size"] == expected[0]
    assert all(type(number) is int for number in (made.global_batch, made.grad_accum))


def test_a_batch_that_is_given_whole_is_kept() -> None:
    assert BatchSizes.divided(48, 2, 4, 6) == BatchSizes(48, 4, 6)


def test_a_global_batch_that_the_json_multiplies_to_is_adopted(planned: Planner) -> None:
    ds = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}
    made = planned("RANKS=3", ds)
    assert made.config.train.global_batch == 30
    origin = made.config.origin("train.global_batch")
    assert origin.endswith("ds.json: gradient_accumulation_steps")
    assert "train.global_batch" in [event["key"] for event in made.events]


def test_a_ramp_is_described_and_counted(planned: Planner) -> None:
    made = planned("RANKS=4 ramp.batch_from=12 ramp.batch_tokens=100000")
    assert "from 12 windows per step by 12 to 48 over 100,000 tokens" in describe(made)
    tokens = f"train.tokens={128 * 8 * 10}"
    assert planned(tokens, estimate=False).steps == 2
    assert planned(f"{tokens} {RAMP}", estimate=False).steps == 10
    growing = planned(f"ramp.length_from=16 ramp.length_tokens={128 * 300}")
    samples = (0, 100, 200, 300)
    assert [growing.curriculum.at(sample).pieces for sample in samples] == [8, 4, 2, 1]
    assert "from sequences of 16 tokens, doubling, to 128" in describe(growing)


def test_the_budget_is_the_largest_micro_batch_that_is_estimated(planned: Planner) -> None:
    line = "RANKS=2 ds.zero_optimization.stage=1 data.seq_len=128"
    budget = planned(f"{line} data.batching=token_budget data.tokens_per_batch=512")
    plain = planned(f"{line} train.micro_batch=4")
    assert budget.micro_batch == budget.config.train.micro_batch == 4
    assert budget.estimate.needed == plain.estimate.needed
    assert "as many as fit in 512 positions" in summary(budget)
    assert "100 steps = 4,800 examples" in summary(budget)


def test_routers_of_experts_see_padding(planned: Planner) -> None:
    grouped = "data.batching=length_grouped"
    mixture = planned(f"model.name=deepseek-v3 {grouped}", estimate=False)
    assert mixture.config.data.document_mask is True
    assert "padding does not count in the balance of routers" in summary(mixture)
    assert planned(grouped, estimate=False).config.data.document_mask is None


@pytest.mark.parametrize(
    ("words", "chunk"),
    [
        ("", 8192),
        ("ds.tensor_parallel.autotp_size=2", 8192),
        ("ds.sequence_parallel_size=2", 16_384),  # half as many tokens
        ("model.loss_chunk=100", 100),
        ("model.loss_chunk=0", 0),
        ("model.overrides.vocab_size=32000", 0),
        # 32,064 entries and 8,192 tokens are 1,002 MiB, 65,536 are 2 GiB.
        ("model.overrides.vocab_size=64128 ds.tensor_parallel.autotp_size=2", 0),
        ("model.overrides.vocab_size=64128", 8192),
    ],
)
def test_large_logits_are_taken_in_chunks(words: str, chunk: int, planned: Planner) -> None:
    made = planned(f"{LARGE} {words}", estimate=False)
    assert made.loss_chunk == made.to_json()["loss_chunk"] == chunk
    assert (f"loss in chunks of {chunk:,} logits" in describe(made)) is (chunk > 0)


def test_the_estimate_is_that_of_the_chunks(planned: Planner) -> None:
    gib = []
    for words in ("", "model.loss_chunk=8192", "model.loss_chunk=0"):
        estimate = planned(f"{LARGE} {words}").estimate
        gib.append(estimate.worst.phase("loss")["logits and loss"] / 2**30)
    assert gib[0] == gib[1] == pytest.approx(1.48, abs=0.01)
    assert gib[2] == pytest.approx(11.74, abs=0.01)


def test_longer_lengths_are_evaluated_where_positions_reach_them(planned: Planner) -> None:
    words = "model.overrides.max_position_embeddings=256 model.context=512 data.seq_len=64"
    lengths = "eval.seq_len=512 'eval.needle_lengths=[128, 512]'"
    made = planned(f"{words} {lengths}", estimate=False)
    assert made.config.eval.needle_lengths == [128, 512]


@pytest.mark.parametrize("rehearse", ["", "data.rehearse=. data.rehearse_share=0"])
def test_a_recurrent_model_carries_its_state(rehearse: str, planned: Planner) -> None:
    """Old data may be measured."""
    made = planned(f"{CARRY} {rehearse}", estimate=False)
    assert made.config.train.carry_state
    assert made.config.data.rehearse == ("." if rehearse else None)


def test_the_plan_knows_what_models_carry() -> None:
    assert tuple(WINDOWS) == tuple(CARRIED)


def test_all_that_is_in_the_way_of_carrying_is_named_at_once(planned: Planner) -> None:
    words = {
        "model.compile": "true",
        "model.stochastic_depth": "0.1",
        "model.lora.rank": "4",
        "data.mix": """'[{path="a"}, {path="b"}]'""",
        "data.batching": "padded",
        "data.document_mask": "true",
        "ramp.batch_from": "8",
        "ramp.length_from": "32",
    }
    ramps = "ramp.batch_tokens=10000 ramp.length_tokens=1000"
    ds: dict[str, Any] = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}
    line = " ".join(f"{key}={value}" for key, value in words.items())
    problems = planned.problems(f"{CARRY} {line} {ramps}", ds)
    carried = [problem for problem in problems if "train.carry_state" in problem]
    named = {*words, "pipeline.stages", "tensor_parallel.autotp_size"}
    assert {problem.split()[0] for problem in carried} == named
