"""Runs that train adapters beside weights in 4 bits: saved, resumed, exported, opened by peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from harness.checkpoint.find import checkpoint_of
from harness.models.loss import forward
from harness.run.probe import stored_probe
from harness.runfolder import RunFolder
from tests.run.short_run import train
from tests.run.test_adapters import logits, losses
from tests.run_tools import run_tool
from tools.proofs.zygote import Zygote

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def words(lora_words: list[str]) -> list[str]:
    return [*lora_words, "model.lora.quantize=nf4"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, words: list[str], zygote: Zygote) -> RunFolder:
    """A run of six steps, never stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(zygote, "zero2", run, *words, "train.steps=6", "save.export=true")
    return RunFolder(run)


def quantized(base: Path, run: RunFolder) -> Any:
    """Return the base as the docs say to open it."""
    description = json.loads((run.export_dir / "quantization_config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=BitsAndBytesConfig.from_dict(description)
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # rows of this model are not packed
    return model


def adapted(base: Path, run: RunFolder) -> Any:
    return PeftModel.from_pretrained(quantized(base, run), str(run.export_dir)).eval()


def test_peft_opens_the_export_on_the_quantized_base(whole: RunFolder, base: Path) -> None:
    assert {path.name for path in whole.export_dir.glob("*.safetensors")} == {
        "adapter_model.safetensors"
    }
    model, checkpoint = adapted(base, whole), checkpoint_of(str(whole.path))
    probe, total = stored_probe(checkpoint), 0.0
    with torch.no_grad():
        for row in range(len(probe.labels)):
            rows = slice(row, row + 1)
            total += forward(model, probe.input_ids[rows], probe.labels[rows], None)[0].item()
    loss = total / int((probe.labels != -100).sum())
    assert loss == pytest.approx(checkpoint.manifest.probe_loss, rel=1e-6)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (logits(model) - logits(plain)).abs().max() > 1e-2


def test_merged_weights_are_those_that_were_trained_beside(
    whole: RunFolder, base: Path, tmp_path: Path
) -> None:
    run_tool("export_hf", whole.path, "--merge", "--out", tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(adapted(base, whole)), rtol=1e-5, atol=1e-5)
    assert (tmp_path / "merged" / "adapters" / "quantization_config.json").is_file()


def test_checkpoints_hold_adapters_alone(whole: RunFolder) -> None:
    index = json.loads((whole.checkpoints_dir / "step-00000006" / "index.json").read_text())
    assert index
    assert all("lora_" in name for name in index)


@pytest.mark.parametrize(("layout", "tolerance"), [("zero2", 0.0), ("zero1", 2e-6)])
def test_a_stopped_run_goes_on(
    layout: str,
    tolerance: float,
    whole: RunFolder,
    words: list[str],
    zygote: Zygote,
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path / "run")
    train(zygote, "zero2", run.path, *words, "train.steps=4")
    train(zygote, layout, run.path, *words, "train.steps=6")
    assert losses(run) == pytest.approx(losses(whole), rel=tolerance, abs=0)


def test_one_talks_to_it(whole: RunFolder) -> None:
    words = ("--prompt", "the model reads", "--tokens", "6", "--before")
    lines = run_tool("chat", whole.path, *words).stdout.splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[before]", "[after]"]
