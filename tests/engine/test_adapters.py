"""Adapters of low rank in DeepSpeed's engines, against peft in a plain loop; frozen parameters."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.layout.adapters import Adapters
from harness.layout.shape import Shape
from harness.models.skeleton import hf_config
from tests.engine.results import Result, results_of
from tests.engine.small import MODEL, SEQ_LEN, VOCAB_SIZE
from tests.two_ranks import Ended, run_ranks

pytestmark = pytest.mark.slow

RANK, ALPHA, STEPS, LR = 4, 6.0, 4, 3e-3
ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "targets": {"target_modules": ["q_proj", "v_proj"]},
}
FP32 = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "sequence2")


def base_model() -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(hf_config(MODEL))


def saved_model(folder: Path) -> Path:
    """A folder with the model's config, and the model below base/."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    base_model().save_pretrained(folder / "base")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def ended(folder: Path) -> Ended:
    return run_ranks([sys.executable, "-m", "tests.engine.adapter_checks", folder], folder)


@pytest.fixture(scope="module")
def result(ended: Ended, folder: Path) -> Result:
    """Return a check's result on each rank."""
    return results_of(ended, folder)


def global_batch() -> torch.Tensor:
    """(8, SEQ_LEN + 1) ids: those of tests/engine/rank.py."""
    return torch.randint(0, 24, (8, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))


def adapted_by_peft(base: Path, **settings: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    values = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ALL, **settings}
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **values))


def plain_losses(model: torch.nn.Module, steps: int = STEPS) -> list[float]:
    """Train all that is not frozen as the run config's defaults say."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    ids, losses = global_batch(), []
    for _ in range(steps):
        logits = model(input_ids=ids[:, :-1]).logits
        loss = functional.cross_entropy(logits.reshape(-1, VOCAB_SIZE), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", FP32)
def test_losses_are_those_of_peft_in_a_plain_loop(
    layout: str, result: Result, folder: Path
) -> None:
    model = adapted_by_peft(folder / "base")
    expected = plain_losses(model)
    assert expected[-1] < expected[0] - 0.02
    for rank in result("trained"):
        assert rank[layout]["losses"] == pytest.approx(expected, rel=2e-6)
    saved = load_file(folder / f"trained-{layout}.safetensors")
    stepped = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    assert saved.keys() == {name for name in stepped if "lora" in name}
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, stepped[name].detach(), rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("layout", ["zero1_bf16", "zero3_bf16"])
def test_half_precision_stays_near(layout: str, result: Result, folder: Path) -> None:
    expected = plain_losses(adapted_by_peft(folder / "base"))
    for rank in result("trained"):
        assert rank[layout]["losses"] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_those_of_peft(variant: str, result: Result, folder: Path) -> None:
    expected = plain_losses(adapted_by_peft(folder / "base", **VARIANTS[variant]))
    for rank in result("variants"):
        assert rank[variant] == pytest.approx(expected, rel=2e-6)


def test_checkpoints_hold_what_is_trained(result: Result) -> None:
    shape = Shape.from_hf(MODEL)
    expected = {tensor.name for tensor in Adapters(RANK).tensors(shape)}
    for layout in result("trained")[0]:
        names = {name for rank in result("trained") for name in rank[layout]["saved"]}
        assert names == expected


def test_the_frozen_model_is_divided_under_zero_3_alone(result: Result) -> None:
    whole = result("trained")[0]["zero1"]["elements_held"]
    assert whole == sum(p.numel() for p in base_model().parameters()) + sum(
        tensor.numel for tensor in Adapters(RANK).tensors(Shape.from_hf(MODEL))
    )
    assert result("trained")[0]["zero3"]["elements_held"] == pytest.approx(whole / 2, rel=0.01)


@pytest.mark.parametrize("layout", [*FP32[:6], "zero1_bf16", "zero3_bf16"])
def test_frozen_weights_have_the_estimated_bytes(layout: str, result: Result) -> None:
    for rank in result("trained"):
        assert rank[layout]["bytes"] == pytest.approx(rank[layout]["estimated"], rel=0.01)


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_run_goes_on_from_its_adapters_alone(layout: str, result: Result) -> None:
    for rank in result("resumed"):
        assert rank[layout][:2] == rank[layout][2:]


def test_frozen_parameters_stay_as_they_are(result: Result) -> None:
    names = {tensor.name for tensor in Shape.from_hf(MODEL).tensors()}
    trained = sorted(n for n in names if "embed" not in n and "layers.1." not in n)
    for rank in result("frozen"):
        assert all(values["changed"] == trained for values in rank.values())


def test_runs_with_frozen_parameters_have_the_estimated_bytes(result: Result) -> None:
    for rank in result("frozen"):
        for layout, values in rank.items():
            assert values["bytes"] == pytest.approx(values["estimated"], rel=0.01), layout


def test_frozen_parameters_change_nothing_else(result: Result, folder: Path) -> None:
    first = result("frozen")[0]["zero0"]["losses"]
    assert first[-1] < first[0] - 0.02
    for rank, layout in itertools.product(result("frozen"), ("zero1", "zero2", "zero3")):
        assert rank[layout]["losses"] == pytest.approx(first, rel=2e-6)
