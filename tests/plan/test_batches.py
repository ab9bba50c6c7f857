"""Batches, ramps, lengths, chunks of a loss and carried states, as decided by a plan."""

from __future__ import annotations

from typing import Any

import pytest

from harness.layout.state_size import CARRIED
from harness.models.recurrent_state import WINDOWS
from harness.plan.text import summary
from tests.plan.plans import Planner

RAMP = "ramp.batch_from=8 ramp.batch_tokens=100000"
CARRY = "RANKS=4 train.carry_state=true plan.force=true model.name=$lstm data.seq_len=16"
# Llama-3-8B, with 8,192 tokens on each of two ranks.
LARGE = (
    "RANKS=2 GPU=h100-80 ds.bf16.enabled=true model.name=llama-3-8b data.seq_len=8192 "
    "train.micro_batch=1 train.global_batch=2"
)


def test_a_ramp_is_counted(planned: Planner) -> None:
    tokens = f"train.tokens={128 * 8 * 10}"
    assert planned(tokens, estimate=False).steps == 2
    assert planned(f"{tokens} {RAMP}", estimate=False).steps == 10
    growing = planned(f"ramp.length_from=16 ramp.length_tokens={128 * 300}", estimate=False)
    samples = (0, 100, 200, 300)
    assert [growing.curriculum.at(sample).pieces for sample in samples] == [8, 4, 2, 1]


def test_the_budget_is_the_largest_micro_batch_that_is_estimated(planned: Planner) -> None:
    line = "RANKS=2 ds.zero_optimization.stage=1 data.seq_len=128"
    budget = planned(f"{line} data.batching=token_budget data.tokens_per_batch=512")
    plain = planned(f"{line} train.micro_batch=4")
    assert budget.micro_batch == budget.config.train.micro_batch == 4
    assert budget.estimate.needed == plain.estimate.needed


def test_routers_of_experts_see_padding(planned: Planner) -> None:
    grouped = "data.batching=length_grouped"
    mixture = planned(f"model.name=deepseek-v3 {grouped}", estimate=False)
    assert mixture.config.data.document_mask is True
    assert "padding does not count in the balance of routers" in summary(mixture)
    assert planned(grouped, estimate=False).config.data.document_mask is None


def test_the_estimate_is_that_of_the_chunks(planned: Planner) -> None:
    gib = []
    for words, chunk in (("", 8192), ("model.loss_chunk=8192", 8192), ("model.loss_chunk=0", 0)):
        made = planned(f"{LARGE} {words}")
        gib.append(made.estimate.worst.phase("loss")["logits and loss"] / 2**30)
        assert made.to_json()["loss_chunk"] == chunk
        assert ("loss in chunks" in summary(made)) is (chunk > 0)
    assert gib[0] == gib[1] == pytest.approx(1.48, abs=0.01)
    assert gib[2] == pytest.approx(11.74, abs=0.01)


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
