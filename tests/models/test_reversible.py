"""Reversible layers: autograd's gradients, from two streams alone."""

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from harness.layout.recompute import flops_again, matrix_elements
from harness.layout.shape import Shape, flops_per_unit
from harness.models.layer_changes import tile_mlps
from harness.models.loss import forward
from harness.models.recompute import saved_by
from harness.models.reversible import Streams, arguments_of, halves_of, reverse_layers
from harness.models.skeleton import DTYPES, hf_config, skeleton
from harness.models.units import decoder_layers
from harness.plan.layers import REVERSIBLE_FAMILIES
from tests.engine.small import MODEL
from tests.models import small
from tests.models.small import Counted, loss_and_gradients
from tests.tiers import rest_in_gate

SIZES: dict[str, Any] = {**MODEL, "pad_token_id": 63}
MORE: dict[str, dict[str, Any]] = {
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.3),
    "gpt_neox": {"use_parallel_residual": False, "hidden_dropout": 0.3},
    "phi3": {"resid_pdrop": 0.3, "attention_dropout": 0.3},
    "gemma": {"head_dim": 8},
}


def built(model_type: str = "llama", precision: str = "fp32", **sizes: Any) -> Any:
    config = {**SIZES, "model_type": model_type, **MORE.get(model_type, {}), **sizes}
    return small.built(config, precision)


def reversible(*args: Any, **sizes: Any) -> Any:
    model = built(*args, **sizes)
    reverse_layers(model)
    return model


def errors(model: Any, reference: Any) -> dict[str, float]:
    """Return each gradient's relative distance from that of the streams kept by autograd."""
    add = Streams.add
    with mock.patch.object(Streams, "add", lambda self, half, _reversible: add(self, half, False)):
        expected = loss_and_gradients(reference)
    actual = loss_and_gradients(model)
    assert actual.keys() == expected.keys()
    return {n: float((actual[n] - g).norm() / g.norm()) for n, g in expected.items()}


@pytest.mark.parametrize("model_type", rest_in_gate("models", REVERSIBLE_FAMILIES))
def test_a_layer_is_its_two_halves(model_type: str) -> None:
    """Added to one stream, they equal transformers' layer bit for bit."""
    model = built(model_type)
    _, layers = decoder_layers(model)
    inputs: dict[str, Any] = {}

    def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.update(args=args, kwargs=kwargs)

    hook = layers[1].register_forward_pre_hook(note, with_kwargs=True)
    loss_and_gradients(model)
    hook.remove()
    arguments = arguments_of(layers[1].forward, *inputs["args"], **inputs["kwargs"])
    hidden = arguments.pop("hidden_states")
    torch.manual_seed(2)
    expected = layers[1](*inputs["args"], **inputs["kwargs"])
    attention, mlp = halves_of(layers[1])
    torch.manual_seed(2)
    middle = hidden + attention(hidden, **arguments)
    torch.testing.assert_close(middle + mlp(middle), expected, rtol=0, atol=0)


@pytest.mark.parametrize("model_type", rest_in_gate("models", REVERSIBLE_FAMILIES))
def test_gradients_are_autograds_within_rounding(model_type: str) -> None:
    """GPT-2, GPT-NeoX and Phi-3 use dropout: the second draw gives the same numbers."""
    worst = errors(reversible(model_type), reversible(model_type))
    assert worst.pop("loss") == 0
    assert 0 < max(worst.values()) < 2e-6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_streams_in_fp32_come_back_in_half_precision(precision: str) -> None:
    """The error of 24 inversions in fp32 vanishes when streams are rounded for reading."""
    models = [reversible(precision=precision, num_hidden_layers=24) for _ in range(2)]
    assert max(errors(*models).values()) < torch.finfo(DTYPES[precision]).eps


def test_streams_in_half_precision_would_not_come_back() -> None:
    def rounded(self: Any, embedding: torch.Tensor) -> None:
        vars(self).update(_dtype=embedding.dtype, other=embedding, last=embedding, kept=None)

    models = [reversible(precision="bf16", num_hidden_layers=12) for _ in range(2)]
    with mock.patch.object(Streams, "__init__", rounded):
        assert max(errors(*models).values()) > torch.finfo(torch.bfloat16).eps


def test_what_is_kept_does_not_grow_with_depth() -> None:
    bytes_of = {}
    for layers in (2, 8):
        model = reversible(num_hidden_layers=layers)
        ids = torch.randint(0, 63, (2, 16))
        with saved_by(model) as saved:
            loss = forward(model, ids, ids.clone())[0]
        bytes_of[layers] = saved.bytes
        del loss
    assert bytes_of[2] == bytes_of[8]


def test_nothing_outlives_the_backward_pass() -> None:
    model, made = reversible(), []
    init = Streams.__init__

    def noted(self: Any, embedding: torch.Tensor) -> None:
        init(self, embedding)
        made.append(weakref.ref(self))

    with mock.patch.object(Streams, "__init__", noted):
        loss_and_gradients(model)
    gc.collect()
    assert len(made) == 1
    assert made[0]() is None


def test_two_forward_passes_have_streams_of_their_own() -> None:
    """As when evaluations or more micro-batches run before a backward pass."""
    expected, model = reversible(), reversible()
    loss_and_gradients(expected)
    torch.manual_seed(1)
    ids = torch.randint(0, 63, (2, 16))
    first = forward(model, ids, ids.clone())[0]
    other = forward(model, ids.flip(0), ids.flip(0))[0]
    with torch.no_grad():
        forward(model.eval(), ids, ids)
    first.backward()
    for parameter, alone in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, alone.grad, rtol=0, atol=0)
    other.backward()


def test_generation_reads_its_cache() -> None:
    model = reversible().eval()
    ids = torch.tensor([[3, 1, 4]])
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    cached = model.generate(ids, use_cache=True, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))


def test_tiles_of_an_mlp_are_computed_again_within_its_half() -> None:
    model = reversible()
    tile_mlps(model, 3)
    assert max(errors(model, reversible()).values()) < 2e-6


@pytest.mark.parametrize("tiles", [1, 2])
def test_all_products_of_a_layer_run_again(tiles: int) -> None:
    products = []
    for model in (built(), reversible()):
        if products and tiles > 1:
            tile_mlps(model, tiles)
        with Counted() as counted:
            loss_and_gradients(model)
        products.append(counted.counts["aten::mm"])
    shape = Shape.from_hf(SIZES)
    mlp, layer = 2 * matrix_elements(shape.body.layers[0]), flops_per_unit(shape, 16)[1] // 3
    again = 0 if tiles == 1 else mlp
    assert flops_again(shape, 16, "reversible", tiles)[1] == layer + again
    # Four matrices of attention. Per tile: three forward, again with its half, two again alone, and
    # twice the forward number for the gradients.
    more = 4 + 3 if tiles == 1 else 4 + (3 + 3 + 2 + 6) * tiles - 9
    assert products[1] - products[0] == 3 * more


def test_a_layer_of_another_kind_is_refused() -> None:
    opt = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    model = skeleton(hf_config({**opt, "num_attention_heads": 4}), torch.float32)
    problem = "OPTDecoderLayer is not attention and an MLP, each after a norm"
    with pytest.raises(ValueError, match=problem):
        reverse_layers(model)
