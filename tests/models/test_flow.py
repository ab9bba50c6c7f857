"""Decoders that can be split between their layers, and messages about the others."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from harness.models.flow import trace_flow
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import FAMILIES, MODEL

CONFIG = LlamaConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, vocab_size=16)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.attention_type = "full"

    def forward(self, hidden: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return self.linear(hidden)


class Toy(PreTrainedModel):
    """A decoder whose layers are connected as a test needs."""

    config_class = LlamaConfig

    def __init__(self, wiring: Any) -> None:
        super().__init__(CONFIG)
        self.wiring = wiring
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.head(self.wiring(self, self.embed(input_ids))))


Step = Callable[[Layer, torch.Tensor, torch.Tensor], Any]


def each(step: Step, order: Callable[[Any], Any] = iter) -> Any:
    """Return the wiring that takes `step(layer, hidden states, embedding)` with every layer."""

    def wiring(model: Toy, embedded: torch.Tensor) -> torch.Tensor:
        hidden = embedded
        for layer in order(model.layers):
            assert layer.attention_type == "full"
            hidden = step(layer, hidden, embedded)
        return model.norm(hidden)

    return wiring


in_order = each(lambda layer, hidden, _: layer(hidden))
keyword = each(lambda layer, hidden, _: layer(hidden=hidden))
tuples = each(lambda layer, hidden, _: layer(hidden)[0])
backwards = each(lambda layer, hidden, _: layer(hidden), reversed)
skips_one = each(lambda layer, hidden, _: layer(hidden), lambda layers: layers[:2])
reads_the_embedding = each(lambda layer, hidden, embedded: layer(hidden, embedded * 2))
adds_between = each(lambda layer, hidden, _: layer(hidden) + 1)


def reads_an_earlier_layer(model: Toy, hidden: torch.Tensor) -> torch.Tensor:
    first = hidden = model.layers[0](hidden)
    hidden = model.layers[1](hidden)
    return model.norm(model.layers[2](hidden, {"first": [first + 1]}))


def norm_between(model: Toy, hidden: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(model.layers):
        hidden = layer(hidden)
        if number == 1:
            model.norm(hidden)
    return hidden


def norm_twice(model: Toy, hidden: torch.Tensor) -> torch.Tensor:
    return in_order(model, model.norm(hidden))


def residual_around_all(model: Toy, hidden: torch.Tensor) -> torch.Tensor:
    return in_order(model, hidden) + hidden


@pytest.mark.parametrize("wiring", [in_order, keyword, tuples])
def test_layers_in_a_row_may_be_cut(wiring: Any) -> None:
    model = Toy(wiring).to("meta")
    layers = list(model.layers)
    flow = trace_flow(model)
    assert (flow.before, flow.after, flow.tied) == (("embed",), ("norm", "head"), ())
    assert flow.returns_tuple == (wiring is tuples)
    assert list(model.layers) == layers
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("wiring", "said"),
    [
        (backwards, "does not run its layers once, in order"),
        (skips_one, "runs 2 of its 3 layers"),
        (reads_the_embedding, "layer 0 of Toy reads more than hidden states"),
        (reads_an_earlier_layer, "layer 2 of Toy reads more than hidden states"),
        (adds_between, "does not read the previous layer's output|cannot be traced"),
        (norm_between, "runs norm between its layers"),
        (norm_twice, "runs norm between its layers"),
        (residual_around_all, "the modules after the layers of Toy read more than hidden states"),
    ],
)
def test_other_wirings_are_refused_by_what_they_lack(wiring: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trace_flow(Toy(wiring).to("meta"))


def test_layers_that_share_a_weight_are_refused() -> None:
    model = Toy(in_order).to("meta")
    model.layers[2].linear.weight = model.layers[0].linear.weight
    with pytest.raises(ValueError, match=r"layers.0.linear.weight again as layers.2.linear.weight"):
        trace_flow(model)


def test_layers_skipped_at_random_are_refused() -> None:
    config = {**FAMILIES["opt"], "layerdrop": 0.1}
    with pytest.raises(ValueError, match="at random"):
        trace_flow(skeleton(hf_config(config), torch.float32))


def test_a_tied_head_is_found_at_both_ends() -> None:
    model = skeleton(hf_config({**MODEL, "tie_word_embeddings": True}), torch.float32)
    assert trace_flow(model).tied == (("model.embed_tokens.weight", "lm_head.weight"),)
