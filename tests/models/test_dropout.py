"""Random dropout: of layers in a real decoder, and of attention weights, which each rank draws for
its own heads (on two ranks: tests/engine/test_layouts.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.models.attention import draw_by_place, own_draws
from harness.models.initialize import materialize
from harness.models.layer_changes import drop_layers
from harness.models.skeleton import hf_config, skeleton
from harness.models.units import decoder_layers
from tests.engine.small import FAMILIES, MODEL

RATE = 0.6


def decoder(family: str) -> nn.Module:
    config = MODEL if family == "llama" else FAMILIES[family]
    attention = "eager" if family == "bloom" else "sdpa"
    model = skeleton(hf_config(config), torch.float32, attention)
    materialize(model, 0, torch.device("cpu"))
    return model


@pytest.mark.parametrize("family", ["llama", "bloom", "gpt_neox"])
def test_layers_are_left_out_of_training_alone(family: str) -> None:
    ids = torch.arange(16).view(2, 8)
    model = decoder(family)
    whole = model.eval()(input_ids=ids).logits
    drop_layers(model, RATE)
    assert torch.equal(model.eval()(input_ids=ids).logits, whole)
    model.train()
    assert not torch.equal(model(input_ids=ids).logits, whole)


def test_a_layer_is_there_as_often_as_it_says_and_as_strong_on_average() -> None:
    model = decoder("llama")
    _, layers = decoder_layers(model)
    drop_layers(model, RATE)
    assert [layer.depth_dropout for layer in layers] == pytest.approx([0.2, 0.4, 0.6])
    torch.manual_seed(0)
    hidden = torch.randn(4000, 1, MODEL["hidden_size"])
    model.train()
    for layer in layers:
        layer.self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
        layer.mlp.forward = torch.ones_like  # every layer adds one
        added = (layer(hidden) - hidden)[:, 0, 0]
        left_out = (added.abs() < 1e-6).float().mean()
        assert float(left_out) == pytest.approx(layer.depth_dropout, abs=0.03)
        assert float(added.mean()) == pytest.approx(1.0, abs=0.06)


def test_a_layer_that_changes_the_shape_is_refused() -> None:
    model = decoder("llama")
    drop_layers(model, RATE)
    layer = model.train().model.layers[0]
    layer._forward_hooks, hook = {}, next(iter(layer._forward_hooks.values()))
    with pytest.raises(ValueError, match="cannot be skipped"):
        hook(layer, (torch.zeros(2, 8, 32),), {}, torch.zeros(2, 8, 16))


CPU = torch.device("cpu")


def drawn(place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the draws of a rank within the body, and after it."""
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
    assert torch.equal(first, drawn(0)[0])  # as a recomputed layer draws


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
    """Evaluation draws nothing: the result is the same as without dropout."""
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
