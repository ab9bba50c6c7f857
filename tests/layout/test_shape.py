"""Shapes equal transformers' own models built on meta, name by name and shape by shape."""

from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from harness.layout.families import FAMILIES, SIZE_KEYS, UnknownArchitecture
from harness.layout.shape import (
    Shape,
    active_parameters,
    flops_per_token,
    num_parameters,
    parameters_by_kind,
)
from tests.tables import beside

_TABLES = beside(__file__, "shape.toml", with_parts=True)
TINY, GQA, MOE, QWEN_MOE = (
    _TABLES["parts"][name] for name in ("tiny", "heads", "experts", "qwen_experts")
)
CASES: list[tuple[str, dict[str, Any]]] = [
    (model_type, config) for model_type, configs in _TABLES["configs"].items() for config in configs
]


def transformers_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter of transformers' model, tied ones once."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


def our_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter of ours."""
    return {tensor.name: tensor.shape for tensor in shape.tensors()}


@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_tensors_equal_transformers(model_type: str, config: dict[str, Any]) -> None:
    theirs = transformers_tensors(AutoConfig.for_model(model_type, **config))
    shape = Shape.from_hf({"model_type": model_type, **config})
    assert our_tensors(shape) == theirs
    assert num_parameters(shape) == sum(torch.Size(size).numel() for size in theirs.values())


def test_every_family_has_a_tiny_case() -> None:
    assert {case for case, _ in CASES} >= FAMILIES.keys()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_default_sized_models_equal_transformers(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    assert our_tensors(Shape.from_hf(config.to_dict())) == transformers_tensors(config)


@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_missing_keys_mean_what_transformers_means(model_type: str, config: dict[str, Any]) -> None:
    """The sizes of the sparse config equal those of transformers' completed one."""
    filled = AutoConfig.for_model(model_type, **config).to_dict()
    assert Shape.from_hf({"model_type": model_type, **config}) == Shape.from_hf(filled)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_without_key_heads_has_those_of_transformers(model_type: str) -> None:
    sizes = {"hidden_size": 96 * 64, "num_attention_heads": 96, "num_hidden_layers": 2}
    config = AutoConfig.for_model(model_type, **sizes)
    sparse = {k: v for k, v in config.to_dict().items() if k not in SIZE_KEYS["kv_heads"]}
    assert our_tensors(Shape.from_hf(sparse)) == transformers_tensors(config)


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "phi3", "qwen2", "qwen3"])
def test_key_heads_of_null_are_the_attention_heads(model_type: str) -> None:
    """The other classes reject null."""
    config = AutoConfig.for_model(
        model_type, hidden_size=96 * 64, num_attention_heads=96, num_key_value_heads=None
    )
    shape = Shape.from_hf(config.to_dict() | {"num_key_value_heads": None})
    assert shape.num_kv_heads == config.num_key_value_heads == 96


@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_keys_of_other_families_mean_nothing(model_type: str, config: dict[str, Any]) -> None:
    """A size whose key the config class does not read does not affect the model."""
    family, config_class = FAMILIES[model_type], type(AutoConfig.for_model(model_type))
    others = {
        key: 8 * number
        for number, (size, keys) in enumerate(SIZE_KEYS.items(), 3)
        for key in set(keys) - set(family.size_keys(size))
        if not isinstance(getattr(config_class, key, None), property)  # cannot be set at all
    }
    assert others
    odd = AutoConfig.for_model(model_type, **config, **others)
    shape = Shape.from_hf({"model_type": model_type, **config, **others})
    assert our_tensors(shape) == transformers_tensors(odd)
    assert shape == Shape.from_hf({"model_type": model_type, **config})


def test_shape_parameter_parts_sum_to_the_total() -> None:
    shape = Shape.from_hf({"model_type": "qwen3_moe", **TINY, **GQA, **QWEN_MOE, "head_dim": 8})
    parts = (shape.body.before, *shape.body.layers, shape.body.after)
    assert sum(tensor.numel for part in parts for tensor in part) == num_parameters(shape)
    assert sum(parameters_by_kind(shape).values()) == num_parameters(shape)
    assert parameters_by_kind(shape)["router"] == 3 * 4 * 48


def test_shape_reads_sliding_windows() -> None:
    def windows(model_type: str, **config: Any) -> tuple[int | None, ...]:
        keys = {"model_type": model_type, **TINY, **GQA, **config}
        return Shape.from_hf(keys).sliding_windows

    assert windows("llama", sliding_window=16) == (None, None, None)
    assert windows("mistral", sliding_window=16) == (16, 16, 16)
    assert windows("mistral", sliding_window=None) == (None, None, None)
    assert windows("gemma2", sliding_window=16) == (16, None, 16)
    assert windows("qwen2", sliding_window=16) == (None, None, None)
    upper = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
    assert windows("qwen2", **upper) == (None, 16, 16)
    named = ["full_attention", "sliding_attention", "full_attention"]
    assert windows("qwen3", **upper, layer_types=named) == (None, 16, None)


def test_flops_of_a_published_model() -> None:
    """GPT-2 124M calculated: 12 layers of 12 h^2, a tied head, attention of 12 L h T."""
    shape = Shape.from_hf(AutoConfig.for_model("gpt2").to_dict())
    matrices = 12 * 12 * 768**2 + 50257 * 768
    assert active_parameters(shape) == matrices
    assert flops_per_token(shape, 1024) == 6 * matrices + 12 * 12 * 768 * 1024


def test_flops_count_chosen_experts_and_windows_only() -> None:
    config = {"model_type": "mixtral", **TINY, **GQA, **MOE}
    shape = Shape.from_hf(config)
    attention = 48 * (48 + 16 + 16) + 48 * 48
    per_layer = attention + 4 * 48 + 2 * 3 * 48 * 80
    assert active_parameters(shape) == 3 * per_layer + 96 * 48
    all_chosen = Shape.from_hf({**config, "num_experts_per_tok": 4})
    assert active_parameters(all_chosen) - active_parameters(shape) == 3 * 2 * 3 * 48 * 80

    sliding = Shape.from_hf({**config, "sliding_window": 16})
    assert flops_per_token(sliding, 64) == 6 * active_parameters(shape) + 12 * 3 * 48 * 16
    assert flops_per_token(sliding, 8) == flops_per_token(shape, 8)


def test_unknown_architecture_is_rejected() -> None:
    with pytest.raises(UnknownArchitecture, match=r"no table for model_type 'mamba'"):
        Shape.from_hf({"model_type": "mamba", **TINY})


@pytest.mark.parametrize(("change", "message"), _TABLES["rows"]["wrong"])
def test_bad_configs_name_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape.from_hf({"model_type": "llama", **TINY, **change})


def test_every_problem_in_one_error() -> None:
    with pytest.raises(ValueError, match="llama config:") as error:
        Shape.from_hf({"model_type": "llama"})
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        assert key in str(error.value)
