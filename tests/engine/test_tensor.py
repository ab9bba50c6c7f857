"""Divided tensors on two ranks: the same weights and logits, half of each matrix on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

Result = Callable[[str], list[Any]]
Tensors = Callable[[str, str], dict[str, torch.Tensor]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_start_from_the_weights_that_one_process_draws(
    stage: int, tensors: Tensors, drawn_weights: dict[str, torch.Tensor]
) -> None:
    assembled = tensors("tensor_weights", f"tensor-initial-{stage}")
    assert assembled.keys() == drawn_weights.keys()
    assert all(torch.equal(assembled[name], tensor) for name, tensor in drawn_weights.items())


def test_each_rank_holds_half_of_what_is_divided_and_all_of_the_rest(
    result: Result, drawn_weights: dict[str, torch.Tensor]
) -> None:
    whole = sum(tensor.numel() for tensor in drawn_weights.values())
    for rank in result("tensor_weights"):
        for elements in rank.values():
            assert elements["undivided"] == sum(
                t.numel() for t in drawn_weights.values() if t.ndim < 2
            )
            assert (
                elements["elements_held"]
                == elements["undivided"] + (whole - elements["undivided"]) // 2
            )


def test_the_last_tokens_logits_and_an_evaluation_are_the_undivided_models(result: Result) -> None:
    for apart in result("tensor_logits"):
        assert apart["size"] == 64
        assert apart["logits"] < 1e-6
        assert apart["sums"] < 1e-4  # of some hundred tokens, nats


def test_a_divided_vocabulary_has_torchs_cross_entropy(result: Result) -> None:
    for differences in result("divided_cross_entropy"):
        for smoothing, apart in differences.items():
            assert apart["loss"] < 1e-6, smoothing
            assert apart["gradient"] < 1e-6, smoothing


def test_each_rank_draws_dropout_for_its_own_heads_and_all_else_alike(result: Result) -> None:
    """A layer that is computed again in the backward pass draws the same again."""
    one, other = result("divided_dropout")
    for drawn in (one, other):
        assert drawn["layers"] == 3
        assert drawn["again"]
        assert drawn["between_layers"]
        assert drawn["shape"][1] == 2  # of four heads
    assert one["masks"] != other["masks"]
    assert one["after"] == other["after"]
