"""Weights that change when they are read: a vocabulary with new rows, quantized weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.config.run_file import load_run_config
from harness.engine.reading import config_of_files
from harness.layout.world import World
from harness.models.initialize import add_rows, with_rows
from harness.models.skeleton import hf_config, skeleton
from harness.plan.make import make_plan
from tests.engine.engines import (
    cells,
    different,
    drawn_weights,
    engine_of,
    folder,
    given_weights,
    losses,
)
from tests.engine.small import FAMILIES, MODEL, VOCAB_SIZE
from tests.ranks import ranks

NEW = 3
ROWS = {"vocab_size": VOCAB_SIZE + NEW}
USUAL = ("zero0", "zero3", "zero1 pipeline2", "zero1 tensor2")


def expected() -> dict[str, torch.Tensor]:
    """Return the given weights, with rows of their mean in embedding and head."""
    weights = given_weights()
    for name, tensor in weights.items():
        if "embed" in name or "head" in name:
            mean = tensor.mean(0, keepdim=True)
            weights[name] = torch.cat([tensor, *[mean] * NEW])
    return weights


@pytest.mark.parametrize("layout", cells([*USUAL, "zero1", "zero2"], USUAL))
@ranks(2)
def test_new_rows_are_the_mean_of_the_others_in_every_layout(layout: str) -> None:
    model = {"init_from": str(folder() / "given"), "overrides": ROWS}
    engine = engine_of(layout, model=model)
    masters = dict(engine.masters())
    assert engine.plan.model_config["vocab_size"] == VOCAB_SIZE + NEW
    assert different(masters.items(), expected()) == []
    assert losses(engine, 1)
    assert "unused_weights" not in {event["kind"] for event in engine.events}


def test_rows_of_a_whole_model_and_one_that_is_tied() -> None:
    for tied in (True, False):
        config = hf_config({**MODEL, "tie_word_embeddings": tied})
        model = skeleton(config, torch.float32).to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model.tie_weights()
        before = model.get_output_embeddings().weight.detach().clone()
        add_rows(model, VOCAB_SIZE)
        assert torch.equal(model.get_output_embeddings().weight, before)
        add_rows(model, VOCAB_SIZE + NEW)
        head = model.get_output_embeddings()
        assert torch.equal(head.weight, with_rows(before, VOCAB_SIZE + NEW))
        assert (head.weight is model.get_input_embeddings().weight) == tied
        assert (head.out_features, model.config.vocab_size) == (VOCAB_SIZE + NEW,) * 2


def test_a_weight_without_missing_rows_stays_as_it_is() -> None:
    weight = torch.randn(4, 2)
    assert with_rows(weight, 4) is with_rows(weight, None) is weight
    half = with_rows(weight.bfloat16(), 5)
    assert torch.equal(half[4], weight.bfloat16().float().mean(0).bfloat16())


def write_quantized(
    path: Path, config: dict[str, Any], quantization: dict[str, Any], stored: dict[str, Any]
) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})


def write_fp8(path: Path) -> dict[str, torch.Tensor]:
    """Write 8-bit weights with a scale for each block; return the values that they represent."""
    stored, weights = dict[str, torch.Tensor](), drawn_weights()
    for name, tensor in list(weights.items()):
        if "_proj" not in name:
            stored[name] = tensor
            continue
        scale = tensor.abs().max() / 448.0
        stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
        weights[name] = stored[name].float() * scale
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    write_quantized(path, MODEL, {**quantization, "activation_scheme": "dynamic"}, stored)
    return weights


@pytest.mark.parametrize("number", [1, 3])
@ranks(1)
def test_weights_in_8_bits_are_trained_as_what_they_stand_for(number: int, tmp_path: Path) -> None:
    weights = write_fp8(tmp_path / "fp8")
    source = str(tmp_path / "fp8")
    engine = engine_of(f"zero{number}", model={"name": source, "init_from": source})
    assert "quantization_config" not in engine.plan.model_config
    masters = dict(engine.masters())
    assert masters.keys() == weights.keys()
    for name, tensor in masters.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-2, atol=1e-5)


def test_rank_with_a_plan_reads_no_model_config(tmp_path: Path) -> None:
    """A rank that failed there would leave the others waiting."""
    write_fp8(tmp_path / "fp8")
    words = [
        f"model.init_from={tmp_path / 'fp8'}",
        f"model.overrides.vocab_size={VOCAB_SIZE + NEW}",
        f"model.overrides.pad_token_id={VOCAB_SIZE}",
    ]
    plan = make_plan(load_run_config(None, [*words, "data.seq_len=8"]), {}, World())
    (tmp_path / "fp8" / "config.json").unlink()
    empty: Any = SimpleNamespace(config=hf_config(plan.model_config))
    config = config_of_files(plan, empty)
    assert config is not None
    assert (config.vocab_size, empty.config.vocab_size) == (VOCAB_SIZE, VOCAB_SIZE + NEW)
    assert (config.pad_token_id, config.quantization_config["dequantize"]) == (None, True)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@ranks(1)
def test_experts_in_4_bits_are_trained_as_what_they_stand_for(tmp_path: Path) -> None:
    """Uses gpt-oss's published format: two codes per byte, an exponent for each 32."""
    config = {**FAMILIES["gpt_oss"], "hidden_size": 32, "intermediate_size": 32}
    stored, expected = dict[str, torch.Tensor](), {}
    draw = torch.Generator().manual_seed(0)
    for name, tensor in drawn_weights(config).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = expected[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw)
        scales = torch.randint(120, 128, (experts, outputs, inputs // 32), generator=draw)
        stored[f"{name}_blocks"] = codes.to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        pairs = torch.stack([FP4[codes & 15], FP4[codes >> 4]], -1).flatten(-2)
        whole = pairs * torch.exp2(scales - 127.0)[..., None]
        expected[name] = whole.flatten(-2).transpose(1, 2)
    write_quantized(tmp_path / "mxfp4", config, {"quant_method": "mxfp4"}, stored)
    source = str(tmp_path / "mxfp4")
    model = {"name": source, "init_from": source, "attention": "eager"}
    engine = engine_of("zero1", model=model)
    for name, tensor in engine.masters():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=1e-6)
