"""Divided experts on two ranks: the same weights, gradients and logits, half of them on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.layout.expert import FAMILIES
from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import MIXTURES

pytestmark = pytest.mark.slow

Result = Callable[[str], list[Any]]
Tensors = Callable[[str, str], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def drawn() -> dict[str, torch.Tensor]:
    """The initial weights of the Mixtral, drawn by one process alone."""
    model = skeleton(hf_config(MIXTURES["mixtral"]), torch.float32)
    materialize(model, 0, torch.device("cpu"))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_undivided_experts(family: str, result: Result) -> None:
    for rank in result("expert_families"):
        assert rank[family] < 1e-5


@pytest.mark.parametrize(
    "way", ["zero2", "zero3", "zero3, recomputed", "zero2, offloaded", "zero3, offloaded"]
)
def test_gradients_are_those_of_undivided_experts_in_every_way(way: str, result: Result) -> None:
    for rank in result("expert_layouts"):
        assert rank[way] < 1e-5


def test_a_rank_that_gets_no_token_keeps_nobody_waiting(result: Result) -> None:
    for rank in result("a_rank_without_tokens"):
        assert rank.pop("last experts") == 0
        assert all(apart < 1e-5 for apart in rank.values()), rank


def test_deepspeed_clips_by_the_norm_of_all_experts(result: Result) -> None:
    for rank in result("expert_norms"):
        assert rank == {name: pytest.approx(1, abs=1e-6) for name in rank}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_start_from_the_weights_that_one_process_draws(
    stage: int, tensors: Tensors, drawn: dict[str, torch.Tensor]
) -> None:
    divided = tensors("expert_weights", f"expert-initial-{stage}")
    assert divided.keys() == drawn.keys()
    assert all(torch.equal(divided[name], tensor) for name, tensor in drawn.items())


def test_given_weights_are_read_and_divided(result: Result) -> None:
    assert result("expert_given_weights") == [{"zero1": True, "zero3": True}] * 2


def test_each_rank_holds_half_of_the_experts_and_all_of_the_rest(
    result: Result, drawn: dict[str, torch.Tensor]
) -> None:
    of_experts = sum(t.numel() for name, t in drawn.items() if ".experts." in name)
    rest = sum(t.numel() for t in drawn.values()) - of_experts
    for rank in result("expert_weights"):
        for zero, counts in rank.items():
            assert counts["undivided"] == rest
            assert counts["experts"] == of_experts // 2
            assert all(here * 2 == whole for here, whole in counts["divided"].values())
            shards = 2 if zero == "3" else 1
            assert counts["elements_held"] == rest // shards + of_experts // 2


def test_the_last_tokens_logits_and_an_evaluation_are_the_undivided_models(result: Result) -> None:
    for rank in result("expert_evaluation"):
        assert rank["logits"] < 1e-6
        assert rank["sums"] < 1e-4  # of some hundred tokens, nats
        assert rank["undivided tokens"] is None
        assert rank["tokens"] == 0  # counted of training batches alone


def test_every_token_is_counted(result: Result) -> None:
    first, second = result("expert_counts")
    assert first["tokens"] == second["tokens"]  # of all ranks
    for layer in first["tokens"]:
        assert sum(layer) == 2 * first["batch_tokens"] * first["chosen"]
    exchanges = first["layers"] * first["micro_batches"]
    assert first["calls"] == second["calls"] == exchanges * 5
