"""Dropout that each rank draws for its own heads; on two ranks: tests/engine/test_tensor.py."""

from __future__ import annotations

import pytest
import torch

from harness.models.attention import draw_by_place, own_draws
from harness.models.skeleton import hf_config
from tests.engine.small import MODEL

CPU = torch.device("cpu")


def drawn(place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the draws of a rank within, and after."""
    torch.manual_seed(3)
    torch.rand(2)
    with own_draws(place, CPU):
        within = torch.rand(8)
    return within, torch.rand(8)


def test_ranks_draw_apart_within_and_alike_after() -> None:
    (first, after), (second, later) = drawn(0), drawn(1)
    assert not torch.equal(first, second)
    assert torch.equal(after, later)
    assert not torch.equal(first, after)
    assert torch.equal(first, drawn(0)[0])  # as a layer that is computed again draws


def test_two_layers_draw_apart() -> None:
    torch.manual_seed(3)
    layers = []
    for _ in range(2):
        with own_draws(1, CPU):
            layers.append(torch.rand(8))
    assert not torch.equal(*layers)


def test_an_error_within_leaves_the_generator_as_it_would_be() -> None:
    _, after = drawn(0)
    torch.manual_seed(3)
    torch.rand(2)
    with pytest.raises(KeyError), own_draws(0, CPU):
        raise KeyError
    assert torch.equal(torch.rand(8), after)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_documents_and_masks_stay(attention: str, rate: float) -> None:
    """In evaluation nothing is drawn: the same numbers as without."""
    from transformers import AutoModelForCausalLM

    config = hf_config({**MODEL, "attention_dropout": rate})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    ids = torch.arange(16)[None] % 7
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    before = model(input_ids=ids, position_ids=positions).logits
    draw_by_place(model, 1)
    assert model.config._attn_implementation == (f"own_draws_1_{attention}" if rate else attention)
    assert torch.equal(before, model(input_ids=ids, position_ids=positions).logits)
    trained = [model.train()(input_ids=ids, position_ids=positions).logits for _ in range(2)]
    assert torch.equal(*trained) == (rate == 0)
