"""The metrics of experts' load: one for equal experts, their number for one that has everything."""

from __future__ import annotations

import pytest
import torch

from harness.run.expert_load import expert_load


def load_of(tokens: torch.Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in expert_load(tokens).items()}


def test_equal_experts_and_a_single_one_are_the_ends() -> None:
    equal = load_of(torch.full((2, 4), 7))
    assert equal == {"expert_load_max": 1.0, "expert_load_entropy": pytest.approx(1.0)}
    single = load_of(torch.tensor([[0, 9, 0, 0]]))
    assert single == {"expert_load_max": 4.0, "expert_load_entropy": 0.0}


def test_the_worst_layer_is_the_largest_and_entropies_are_averaged() -> None:
    load = load_of(torch.tensor([[5, 5], [10, 0]]))
    assert load == {"expert_load_max": 2.0, "expert_load_entropy": pytest.approx(0.5)}


def test_undivided_experts_and_no_token_have_no_load() -> None:
    assert expert_load(None) == {}
    assert load_of(torch.zeros(1, 2)) == {"expert_load_max": 0.0, "expert_load_entropy": 0.0}
