"""Recomputed layers and MLPs: the same gradients, from as little as was kept."""

import itertools
from collections import deque
from typing import Any

import pytest
import torch

from harness.models import recompute
from harness.models.attention import draw_by_place
from harness.models.layer_changes import drop_layers, tile_mlps
from harness.models.loss import forward
from harness.models.recompute import Buffers, HostCopy, Keep, Reuse, checkpoint_layers
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import CONFIGS
from tests.models.small import Counted, built, loss_and_gradients

_LLAMA, _BLOOM = CONFIGS["llama"], CONFIGS["bloom"]
_DROPOUTS = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.3)
_GPT2 = {**CONFIGS["gpt2"], **_DROPOUTS}
_LAYERS = 3
WAYS = list(itertools.product(("full", "selective", 2), (False, True)))


@pytest.mark.parametrize(("checkpointing", "offload"), WAYS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [_LLAMA, _GPT2, _BLOOM], ids=["llama", "gpt2", "bloom"])
def test_what_is_computed_again_is_bit_for_bit_the_same(config, precision, checkpointing, offload):
    """GPT-2 uses dropout in and after attention: the second draw gives the same numbers."""
    expected, model = loss_and_gradients(built(config, precision)), built(config, precision)
    checkpoint_layers(model, checkpointing, offload)
    actual = loss_and_gradients(model)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_layer_drop_and_dropout_repeat_in_recomputation():
    models = [built(_GPT2), built(_GPT2)]
    for model in models:
        draw_by_place(model, 1)
        drop_layers(model, 0.5)
    checkpoint_layers(models[1], "selective", to_host=True)
    expected, actual = map(loss_and_gradients, models)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def counts_of(checkpointing: Any, attention: str = "sdpa") -> Counted:
    """Return the operations of a training step."""
    model = built(_LLAMA, attention=attention)
    checkpoint_layers(model, checkpointing)
    with Counted() as counted:
        loss_and_gradients(model)
    return counted


def test_selective_recompute_runs_no_matmul_twice():
    counts = {}
    for checkpointing in ("none", "selective", "full", 2):
        counted = counts_of(checkpointing)
        names = [name for name in counted.counts if "attention" in name and "back" not in name]
        fused = sum(counted.counts[name] for name in names)
        counts[checkpointing] = counted.counts["aten::mm"], fused
    products, attention = counts["none"]
    assert attention == _LAYERS
    assert counts["selective"] == counts["none"]
    assert counts["full"] == (products + 6 * _LAYERS, 2 * attention)  # q, k, v, o, gate, up
    assert counts[2] == (products + 6 * 2, attention + 2)  # layers 0 and 2


def test_scores_that_are_written_out_are_computed_again():
    before, after = (counts_of(kept, "eager").counts for kept in ("none", "selective"))
    assert after["aten::mm"] == before["aten::mm"]
    assert after["aten::bmm"] == before["aten::bmm"] + 2 * _LAYERS


def test_in_place_changed_result_is_recomputed():
    """ZeRO 3 adds a bias in this way to a product whose sum is secretly a view."""
    results = deque[Any]()
    x, weight = torch.randn(2, 3, 4), torch.randn(4, 5)
    with Keep(results, attention=True, buffers=None):
        kept = x.matmul(weight)
        changed = x.matmul(weight)
        changed += 1
    assert results[1] is None
    with Reuse(results, attention=True):
        assert torch.equal(x.matmul(weight), kept)
        assert torch.equal(x.matmul(weight), kept)
    assert not results


def test_offloaded_inputs_are_copies():
    """The layer's input may be overwritten before the backward pass, as a GPU reuses its memory."""
    layer = torch.nn.Linear(4, 4)
    model: Any = torch.nn.Module()
    model.layers = torch.nn.ModuleList([layer])
    recompute._checkpoint(layer, {}, Buffers())
    x = torch.randn(2, 4, requires_grad=True)
    hidden = x * 1
    loss = layer(hidden).square().sum()
    plain = torch.nn.functional.linear(hidden.detach(), layer.weight, layer.bias)
    expected = torch.autograd.grad(plain.square().sum(), layer.weight)[0]
    hidden.data.zero_()
    loss.backward()
    assert torch.equal(layer.weight.grad, expected)


def test_offload_host_memory_is_reused_when_free():
    """If it is page-locked, a GPU waits for it; its smaller blocks serve shorter sequences."""
    buffers = Buffers()
    sizes: list[tuple[int, int]] = [(4, 6), (2, 3), (4, 6)]
    first: set[int] = set()
    for rows in (3, 3, 2, 3):
        tensors = [torch.randn(rows, *size).transpose(1, 2) for size in sizes]
        copies = [HostCopy(tensor, buffers) for tensor in tensors]
        places = {copy.copy.untyped_storage().data_ptr() for copy in copies}
        assert len(places) == len(sizes)
        first = first or places
        assert places == first
        assert [copy.copy.stride() for copy in copies] == [t.stride() for t in tensors]
        returned = [copy.back() for copy in copies]
        del copies
        for _ in range(2):  # what was returned is no longer in the buffers
            HostCopy(torch.zeros(rows, 4, 6), buffers)
        assert all(map(torch.equal, returned, tensors))
    larger = HostCopy(torch.zeros(100), buffers)
    assert larger.copy.untyped_storage().nbytes() == 400
    buffers.take(1, False)
    assert len(buffers._free) == len(sizes) - 2  # a larger one replaced one


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("tiles", [2, 5])
@pytest.mark.parametrize("config", [_LLAMA, _BLOOM], ids=["llama", "bloom"])
def test_mlp_tiles_sum_to_the_whole_mlp(config, tiles, checkpointing):
    expected, model = loss_and_gradients(built(config)), built(config)
    checkpoint_layers(model, checkpointing)
    tile_mlps(model, tiles)
    actual = loss_and_gradients(model)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        ids = torch.zeros(1, 3, dtype=torch.int64)  # fewer tokens than tiles
        assert forward(model.eval(), ids, ids)[0].isfinite()


def test_a_layer_without_a_module_for_its_mlp_is_refused():
    opt = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    model = skeleton(hf_config({**opt, "num_attention_heads": 4}), torch.float32)
    with pytest.raises(ValueError, match="the MLP of OPTDecoderLayer is not a module 'mlp'"):
        tile_mlps(model, 2)
