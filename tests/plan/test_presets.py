"""Every shipped preset has the content of the published model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from harness.layout.families import FAMILIES
from harness.layout.shape import Shape, num_parameters
from harness.models.skeleton import hf_config, skeleton
from harness.plan.model_config import find_model_config, preset_names, presets, presets_as_text
from tests.tables import beside

PRESETS = preset_names()

# Also published.
ROPE_THETA = {
    **dict.fromkeys(("tiny", "gemma-2-9b"), 1e4),
    **dict.fromkeys(("llama-1b", "llama-3-8b", "llama-3-70b", "olmo2-7b"), 5e5),
    **dict.fromkeys(("qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b"), 1e6),
    "gpt2-124m": None,
}


def published_parameters(name: str) -> int:
    """Return the number in a preset's source: from the model card's safetensors, for GPT-2 from its
    repository.
    """
    (count,) = re.findall(r"([\d,]+) parameters", presets()[name]["source"])
    return int(count.replace(",", ""))


def test_the_presets_that_the_docs_promise_are_there() -> None:
    docs = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.-]+)`[^|]*\| ([\d,]+) \|$", docs, re.MULTILINE))
    assert rows == {name: f"{published_parameters(name):,}" for name in PRESETS}
    assert len(rows) >= 10


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_source_and_a_config(name: str) -> None:
    preset = presets()[name]
    assert preset.keys() - {"base", "null", "lr", "lr_source"} == {"source", "config"}
    assert ("lr" in preset) == ("lr_source" in preset)
    assert "base" not in presets()[preset.get("base", name)] or "base" not in preset
    assert all(preset["config"][key] is None for key in preset.get("null", ()))
    assert len(preset["source"]) > 20


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_published_model(name: str) -> None:
    keys, _ = find_model_config(name)
    model = skeleton(hf_config(keys), torch.bfloat16, "eager")
    assert type(model).__name__ == keys["architectures"][0]
    assert model.num_parameters() == published_parameters(name)
    if keys["model_type"] in FAMILIES:  # others are traced
        assert num_parameters(Shape.from_hf(keys)) == published_parameters(name)


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_knows_every_key(name: str) -> None:
    """Unknown keys are kept and ignored by the config class: a typo would be silent."""
    keys, _ = find_model_config(name)
    library_config = AutoConfig.for_model(keys["model_type"])
    # transformers 5 moves them into rope_parameters
    renamed = {"rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"}
    # read although undeclared
    undeclared = {"head_dim"} if keys["model_type"] in ("qwen3_moe", "glm4_moe") else set()
    assert {key for key in keys if not hasattr(library_config, key)} <= renamed | undeclared


@pytest.mark.parametrize("name", PRESETS)
def test_rotary_positions_arrive(name: str) -> None:
    keys = presets()[name]["config"]
    rope = getattr(AutoConfig.for_model(**keys), "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # for families with a rate for each kind of attention
    assert rope.get("rope_theta") == keys.get("rope_theta")
    assert ROPE_THETA.get(name, keys.get("rope_theta")) == keys.get("rope_theta")
    if name == "llama-1b":
        assert (rope["rope_type"], rope["factor"]) == ("llama3", 32.0)


GEMMA_LAYERS = ["sliding_attention", "full_attention"] * 21


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [*beside(__file__, "presets.toml")["own_values"], ("gemma-2-9b", "layer_types", GEMMA_LAYERS)],
)
def test_a_preset_has_its_own_value(name: str, key: str, value: Any) -> None:
    config = hf_config(find_model_config(name)[0])
    assert getattr(config, key) == value
    assert key != "router_aux_loss_coef" or config.output_router_logits


def test_presets_are_listed_by_a_part_of_their_names() -> None:
    listed = presets_as_text("llama-3").splitlines()
    assert len(listed) == sum("llama-3" in name for name in preset_names())
    assert presets_as_text("tinny") == ""
