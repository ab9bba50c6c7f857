"""A model's part on a tensor-parallel rank; what DeepSpeed's AutoTP really holds: memory/."""

from __future__ import annotations

from typing import Any

import pytest

from harness.layout.box import uncovered
from harness.layout.division import autotp_cutter, tensor_shard
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from harness.layout.share import Share

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 250,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def shape(model_type: str = "llama", **config: Any) -> Shape:
    return Shape.from_hf({**SIZES, "model_type": model_type, **config})


def shard(model_type: str = "llama", ranks: int = 2, **config: Any) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in tensor_shard(shape(model_type, **config), ranks).tensors()}


def test_linear_layers_are_divided_by_output_or_input() -> None:
    """The shapes that AutoTP 0.19.8 leaves on either of two ranks."""
    found = shard("qwen2", tie_word_embeddings=False)
    layer = "model.layers.0."
    assert found[f"{layer}self_attn.q_proj.weight"] == (48, 96)
    assert found[f"{layer}self_attn.q_proj.bias"] == (48,)
    assert found[f"{layer}self_attn.k_proj.weight"] == (16, 96)
    assert found[f"{layer}self_attn.o_proj.weight"] == (96, 48)
    assert found[f"{layer}mlp.gate_proj.weight"] == (125, 96)
    assert found[f"{layer}mlp.down_proj.weight"] == (96, 125)
    assert found[f"{layer}input_layernorm.weight"] == (96,)
    assert found["model.embed_tokens.weight"] == (1000, 96)
    assert found["lm_head.weight"] == (500, 96)


def test_a_bias_of_what_is_divided_by_input_is_whole() -> None:
    found = shard("gpt_neox", num_key_value_heads=None, intermediate_size=250)
    layer = "gpt_neox.layers.0."
    assert found[f"{layer}attention.query_key_value.weight"] == (144, 96)
    assert found[f"{layer}attention.query_key_value.bias"] == (144,)
    assert found[f"{layer}attention.dense.weight"] == (96, 48)
    assert found[f"{layer}attention.dense.bias"] == (96,)
    assert found[f"{layer}mlp.dense_h_to_4h.bias"] == (125,)


@pytest.mark.parametrize(("model_type", "rows"), [("llama", 500), ("gemma", 1000)])
def test_a_tied_embedding_is_divided_where_it_is_a_head_that_autotp_divides(
    model_type: str, rows: int
) -> None:
    whole = shape(model_type, tie_word_embeddings=True)
    part = tensor_shard(whole, 2)
    assert part.body.before[0].shape == (rows, 96)
    assert part.vocab_size == rows
    assert tensor_shard(shape(model_type, tie_word_embeddings=False), 2).vocab_size == 1000


def test_the_first_rank_has_most_of_what_does_not_divide() -> None:
    """Three groups of heads and 250 columns over two ranks: two, and 125; over four 1 and 63."""
    uneven = {"num_attention_heads": 6, "num_key_value_heads": 3}
    assert shard(**uneven)["model.layers.0.self_attn.q_proj.weight"] == (64, 96)
    found = tensor_shard(shape(**uneven), 4)
    assert (found.num_heads, found.num_kv_heads, found.intermediate_size) == (2, 1, 63)


def test_one_rank_has_everything() -> None:
    whole = shape()
    assert tensor_shard(whole, 1) is whole


def test_opts_mlp_is_divided_by_heads() -> None:
    """AutoTP finds no "mlp" in its names: 3 heads over 2 ranks, with them two thirds of the MLP."""
    part = tensor_shard(
        shape(
            "opt",
            num_attention_heads=3,
            num_key_value_heads=None,
            ffn_dim=252,
            intermediate_size=None,
        ),
        2,
    )
    assert {t.name: t.shape for t in part.tensors()}["model.decoder.layers.0.fc1.weight"] == (
        168,
        96,
    )
    assert part.intermediate_size == 168


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen2", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 3}),
        ("gpt_neox", {"num_key_value_heads": None}),
        ("opt", {"num_key_value_heads": None, "ffn_dim": 252, "intermediate_size": None}),
    ],
)
def test_the_ranks_have_every_parameter_once_and_the_first_has_what_is_counted(
    model_type: str, config: dict[str, Any], ranks: int
) -> None:
    whole = shape(model_type, **config)
    cutters = {"tensor": autotp_cutter(whole)}
    shares = [Share(Grid(ranks, tensor=ranks), rank, cutters) for rank in range(ranks)]
    first = {tensor.name: tensor.shape for tensor in tensor_shard(whole, ranks).tensors()}
    for tensor in whole.tensors():
        name, sizes = tensor.name, tensor.shape
        parts = [share.part(name, sizes) for share in shares]
        assert parts[0].shape == first[name]
        assert max(part.numel for part in parts) == parts[0].numel
        assert (
            uncovered([p for s, p in zip(shares, parts, strict=True) if s.is_first(name, sizes)])
            is None
        )
