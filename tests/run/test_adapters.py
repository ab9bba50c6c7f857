"""Runs that train adapters: saved, resumed, exported, and opened by peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from harness.errors import ExitCode
from harness.runfolder import RunFolder
from tests.run.short_run import train
from tests.run_tools import run_tool
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow

IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, lora_words: list[str], zygote: Zygote
) -> RunFolder:
    """A run of six steps, never stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(zygote, "zero3", run, *lora_words, "train.steps=6", "save.export=true")
    return RunFolder(run)


def losses(run: RunFolder) -> list[float]:
    return [line["loss"] for line in run.read_metrics() if "loss" in line]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_the_export_is_what_peft_opens(whole: RunFolder, base: Path) -> None:
    assert {path.name for path in whole.export_dir.glob("*.safetensors")} == {
        "adapter_model.safetensors"
    }
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(model)
    after = logits(PeftModel.from_pretrained(model, str(whole.export_dir)))
    assert (before - after).abs().max() > 1e-3
    config = json.loads((whole.export_dir / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert config["base_model_name_or_path"] == str(base)


def test_merged_weights_compute_what_the_adapters_do(
    whole: RunFolder, base: Path, tmp_path: Path
) -> None:
    run_tool("export_hf", whole.path, "--merge", "--out", tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = logits(PeftModel.from_pretrained(model, str(whole.export_dir)))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "merged" / "adapters" / "adapter_config.json").is_file()


def test_checkpoints_hold_adapters_alone(whole: RunFolder) -> None:
    index = json.loads((whole.checkpoints_dir / "step-00000006" / "index.json").read_text())
    assert index
    assert all("lora_" in name for name in index)


@pytest.mark.parametrize(("layout", "tolerance"), [("zero3", 0.0), ("zero1", 2e-6)])
def test_a_stopped_run_goes_on(
    layout: str,
    tolerance: float,
    whole: RunFolder,
    lora_words: list[str],
    zygote: Zygote,
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path / "run")
    train(zygote, "zero3", run.path, *lora_words, "train.steps=4")
    train(zygote, layout, run.path, *lora_words, "train.steps=6")
    assert losses(run) == pytest.approx(losses(whole), rel=tolerance, abs=0)


def test_another_base_is_another_model(
    whole: RunFolder, lora_words: list[str], base: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """Weights that are not in the checkpoint are those that it was trained beside."""
    run, other = tmp_path / "run", tmp_path / "other"
    own = [word for word in lora_words if not word.startswith(("model.name", "model.init_from"))]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(other)
    for path in base.glob("token*"):
        (other / path.name).write_bytes(path.read_bytes())
    there = [*own, f"model.name={other}", f"model.init_from={other}"]
    train(zygote, "zero1", run, *there, "train.steps=2")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.neg_()
    model.save_pretrained(other)
    output = train(zygote, "zero1", run, *there, "train.steps=4", code=ExitCode.NO_CHECKPOINT)
    assert "probe batch" in output


def test_one_talks_to_it_before_and_after(whole: RunFolder) -> None:
    words = ("--prompt", "the model reads", "--tokens", "6", "--before")
    lines = run_tool("chat", whole.path, *words).stdout.splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[before]", "[after]"]
    again = run_tool("chat", whole.path, *words).stdout.splitlines()
    assert again == lines
