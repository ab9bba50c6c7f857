"""model.context: longer rotary positions, as transformers computes them, or a reason why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.models.skeleton import hf_config, skeleton
from harness.plan.model_config import load_model_config
from tests.engine.small import FAMILIES, MODEL

LLAMA = {**MODEL, "head_dim": 16, "max_position_embeddings": 64}
NEW = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
OLD = {**LLAMA, "rope_theta": 500.0}


def extended(config: dict[str, object], folder: Path, *words: str) -> dict[str, object]:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(load_run_config(None, [f"model.name={folder}", *words]))[0]


def frequencies(config: dict[str, object]) -> torch.Tensor:
    model = skeleton(hf_config(config), torch.float32)
    assert model.config.rope_parameters["rope_theta"] == 500.0
    return model.model.rotary_emb.inv_freq


@pytest.mark.parametrize("config", [NEW, OLD], ids=["rope_parameters", "rope_theta"])
def test_frequencies_are_those_of_the_factor(config: dict[str, object], tmp_path: Path) -> None:
    before = frequencies(config)
    linear = extended(config, tmp_path, "model.context=256", "model.rope=linear")
    assert linear["max_position_embeddings"] == 256
    torch.testing.assert_close(frequencies(linear), before / 4)
    yarn = frequencies(extended(config, tmp_path, "model.context=256"))
    # What turns often within the old positions stays, what turns less than once is stretched.
    torch.testing.assert_close(yarn[0], before[0])
    torch.testing.assert_close(yarn[-1], before[-1] / 4)
    ratios = before / yarn
    assert (ratios.diff() >= -1e-6).all()


@pytest.mark.parametrize("changes", [{}, {"partial_rotary_factor": 0.5}], ids=["whole", "in part"])
@pytest.mark.parametrize("config", [NEW, OLD], ids=["rope_parameters", "rope_theta"])
def test_ntk_has_the_frequencies_of_dynamic_at_the_full_length(
    config: dict[str, object], changes: dict[str, object], tmp_path: Path
) -> None:
    config = {**config, **changes}
    changed = hf_config(extended(config, tmp_path, "model.context=256", "model.rope=ntk"))
    assert changed.max_position_embeddings == 256
    dynamic = hf_config(config)
    dynamic.rope_parameters |= {"rope_type": "dynamic", "factor": 1.0}
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](dynamic, "cpu", seq_len=256)
    theta, width = changed.rope_parameters["rope_theta"], 2 * len(expected)
    assert theta > 4 * 500.0
    torch.testing.assert_close(theta ** (-torch.arange(0, width, 2) / width), expected)
    assert changed.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("config", "words", "problem"),
    [
        (LLAMA, ["model.context=64"], "has 64 positions: remove it"),
        (LLAMA, ["model.context=256", "model.rope=ntk"], "has no rope_theta to change"),
        (LLAMA, ["model.rope=linear"], "model.rope does nothing without model.context"),
        (FAMILIES["opt"], ["model.context=64"], "opt models have no rotary positions"),
        (FAMILIES["bloom"], ["model.context=64"], "bloom models have no rotary positions"),
        ({**FAMILIES["falcon"], "alibi": True, "max_position_embeddings": 16},
         ["model.context=64"], "falcon models have no rotary positions"),
        ({**LLAMA, "model_type": "jamba"}, ["model.context=256"], "jamba models have no rotary"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, ["model.context=256"],
         "scaled already (linear)"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
         ["model.context=256"], "each kind of its layers rotates in its own way"),
    ],
)  # fmt: skip
def test_what_cannot_be_extended_is_named(
    config: dict[str, object], words: list[str], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        extended(config, tmp_path, *words)
    assert problem in str(caught.value)
