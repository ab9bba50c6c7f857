"""What an export's configs say in the places where transformers 4 looks.

Its own answer: tests/models/test_older_readers.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint.hub_layout import rewrite_config, rewrite_tokenizer_config
from harness.data.tokenizer import load_tokenizer
from harness.models.skeleton import hf_config
from tests.data.number_tokenizer import write_number_tokenizer
from tests.engine.small import MODEL

Config = dict[str, Any]
PARTIAL = {"partial_rotary_factor": 0.25}
THETA = {"rope_theta": 777.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, **THETA},
    "sliding_attention": {"rope_type": "default", "rope_theta": 333.0},
}


def rewritten(folder: Path, config: Config) -> Config:
    """The config.json of an export of a model that came with `config`."""
    model = hf_config(config)
    model.save_pretrained(folder)
    assert rewrite_config(folder, model, config) == []
    values: Config = json.loads((folder / "config.json").read_text())
    again = getattr(hf_config(values), "rope_parameters", None) or {}
    own = getattr(model, "rope_parameters", None) or {}
    assert {key: of for key, of in again.items() if key != "type" or key in own} == own
    return values


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default", **THETA}}, {**THETA, "rope_scaling": None}),
        ({**THETA, "rope_scaling": None}, {**THETA, "rope_scaling": None}),
        ({"rope_parameters": {**YARN, **THETA}}, {**THETA, "rope_scaling": YARN}),
        (
            {"model_type": "glm", "pad_token_id": 0, "rope_parameters": {**THETA, **PARTIAL}},
            {**THETA, **PARTIAL},
        ),
        ({"model_type": "gpt_neox", "rotary_emb_base": 777, "rotary_pct": 0.5},
         {"rotary_emb_base": 777, "rotary_pct": 0.5, "rope_theta": 777}),
        ({"model_type": "gemma3_text", "rope_parameters": LAYERS},
         {**THETA, "rope_local_base_freq": 333.0,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ({"model_type": "phi3", "original_max_position_embeddings": 16, "pad_token_id": 0,
          "rope_parameters": {"rope_type": "longrope", **LONG, **THETA}},
         {**THETA, "rope_scaling": {"type": "longrope", **LONG}}),
        ({"model_type": "qwen3_moe", "num_local_experts": 4}, {"num_experts": 4}),
        ({"model_type": "qwen3_moe", "num_experts": 4},
         {"num_experts": 4, "num_local_experts": 4}),
        ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
    ],
)  # fmt: skip
def test_version_4_finds_what_version_5_moved(
    config: Config, expected: Config, tmp_path: Path
) -> None:
    values = rewritten(tmp_path, {**MODEL, **config})
    assert {key: values.get(key, "not there") for key in expected} == expected


def test_numbers_that_json_lacks_are_left_to_the_class(tmp_path: Path) -> None:
    values = rewritten(tmp_path, {"model_type": "mamba2"})
    assert "time_step_limit" not in values
    assert hf_config(values).time_step_limit == hf_config({"model_type": "mamba2"}).time_step_limit


def test_weights_that_were_trained_are_not_said_to_be_quantized(tmp_path: Path) -> None:
    config = {**MODEL, "quantization_config": {"quant_method": "fp8"}}
    assert "quantization_config" not in rewritten(tmp_path, config)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"extra_special_tokens": ["<x>"]}, {"additional_special_tokens": ["<x>"]}),
        ({"model_specific_special_tokens": {"image_token": "<x>"}},
         {"extra_special_tokens": {"image_token": "<x>"}}),
        ({"tokenizer_class": "TokenizersBackend"},
         {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ({"tokenizer_class": "LlamaTokenizer"}, {"add_bos_token": False, "add_eos_token": False}),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, {"add_bos_token": True}),
        ({"tokenizer_class": "Qwen2Tokenizer"}, {"tokenizer_class": "Qwen2Tokenizer"}),
    ],
)  # fmt: skip
def test_a_tokenizers_config_is_that_of_version_4(
    written: Config, expected: Config, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(write_number_tokenizer(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    rewrite_tokenizer_config(tmp_path, tokenizer)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert {**values, **expected} == values
    assert isinstance(values.get("extra_special_tokens", {}), dict)


def test_version_5_opens_the_rewritten_tokenizer_as_before(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_number_tokenizer(tmp_path))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<x>"]})
    tokenizer.save_pretrained(tmp_path)
    rewrite_tokenizer_config(tmp_path, tokenizer)
    again = load_tokenizer(tmp_path)
    assert again.extra_special_tokens == tokenizer.extra_special_tokens == ["<x>"]
    assert again("1 2 <x>").input_ids == tokenizer("1 2 <x>").input_ids
