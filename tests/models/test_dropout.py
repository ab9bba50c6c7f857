"""Random dropout: of layers in a real decoder, and of attention weights, head by head."""

import pytest
import torch

from harness.models.attention import draw_by_place, own_draws
from harness.models.layer_changes import drop_layers
from harness.models.units import decoder_layers
from tests.engine.small import CONFIGS, MODEL
from tests.models.small import CPU, built

RATE = 0.6


@pytest.mark.parametrize("family", ["llama", "bloom", "gpt_neox"])
def test_layers_are_left_out_of_training_alone(family: str) -> None:
    ids = torch.arange(16).view(2, 8)
    model = built(CONFIGS[family])
    whole = model.eval()(input_ids=ids).logits
    drop_layers(model, RATE)
    assert torch.equal(model.eval()(input_ids=ids).logits, whole)
    model.train()
    assert not torch.equal(model(input_ids=ids).logits, whole)


def test_layer_drop_keeps_rate_and_mean() -> None:
    model = built(MODEL)
    _, layers = decoder_layers(model)
    drop_layers(model, RATE)
    assert [layer.depth_dropout for layer in layers] == pytest.approx([0.2, 0.4, 0.6])
    torch.manual_seed(0)
    hidden = torch.randn(4000, 1, MODEL["hidden_size"])
    for layer in layers:
        layer.self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
        layer.mlp.forward = torch.ones_like  # every layer adds one
        added = (layer(hidden) - hidden)[:, 0, 0]
        left_out = (added.abs() < 1e-6).float().mean()
        assert float(left_out) == pytest.approx(layer.depth_dropout, abs=0.03)
        assert float(added.mean()) == pytest.approx(1.0, abs=0.06)


def test_a_layer_that_changes_the_shape_is_refused() -> None:
    model = built(MODEL)
    drop_layers(model, RATE)
    layer = model.model.layers[0]
    layer._forward_hooks, hook = {}, next(iter(layer._forward_hooks.values()))
    with pytest.raises(ValueError, match="cannot be skipped"):
        hook(layer, (torch.zeros(2, 8, 32),), {}, torch.zeros(2, 8, 16))


def drawn(place: int) -> list[torch.Tensor]:
    """Return the draws of a rank within the body, in that of the next layer, and after them."""
    torch.manual_seed(3)
    torch.rand(2)
    draws = []
    for _ in range(2):
        with own_draws(place, CPU):
            draws.append(torch.rand(8))
    return [*draws, torch.rand(8)]


def test_ranks_and_layers_draw_apart_within_and_alike_after() -> None:
    (first, next_layer, after), (second, _, later) = drawn(0), drawn(1)
    assert torch.equal(after, later)
    for other in (second, next_layer, after):
        assert not torch.equal(first, other)
    assert torch.equal(first, drawn(0)[0])  # as a recomputed layer draws


def test_an_error_within_leaves_the_generator_as_it_would_be() -> None:
    *_, after = drawn(0)
    torch.manual_seed(3)
    torch.rand(2)
    for _ in range(2):
        with pytest.raises(KeyError), own_draws(0, CPU):
            raise KeyError
    assert torch.equal(torch.rand(8), after)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_documents_and_masks_stay(attention: str, rate: float) -> None:
    """Evaluation draws nothing: the result is the same as without dropout."""
    model = built({**MODEL, "attention_dropout": rate}, attention=attention).eval()
    ids = torch.arange(16)[None] % 7
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    before = model(input_ids=ids, position_ids=positions).logits
    draw_by_place(model, 1)
    assert model.config._attn_implementation == (f"own_draws_1_{attention}" if rate else attention)
    assert torch.equal(before, model(input_ids=ids, position_ids=positions).logits)
    trained = [model.train()(input_ids=ids, position_ids=positions).logits for _ in range(2)]
    assert torch.equal(*trained) == (rate == 0)
