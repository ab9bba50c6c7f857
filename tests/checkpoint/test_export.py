"""Exports that transformers opens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.checkpoint.export import export_hf
from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}


class _Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_opens_with_the_same_weights(family: str, tied: bool, tmp_path: Path) -> None:
    config = hf_config({"model_type": family, **SIZES, "tie_word_embeddings": tied})
    model = skeleton(config, torch.float32)
    materialize(model, 0, torch.device("cpu"))
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    export_hf(tmp_path / "export", model, weights, _Tokenizer())
    opened, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, parameter in opened.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_a_new_export_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    config = hf_config({"model_type": "llama", **SIZES})
    for seed in (0, 1):
        model = skeleton(config, torch.float32)
        materialize(model, seed, torch.device("cpu"))
        export_hf(tmp_path / "export", model, model.named_parameters(), _Tokenizer())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert torch.equal(opened.lm_head.weight, model.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
