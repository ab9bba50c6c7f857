"""Weights in 4 bits in a plan: what is in their way is named, and what they save is counted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from harness.plan.plan import Plan
from harness.plan.text import describe
from tests.engine.small import MODEL
from tests.plan.test_fine_tuning import plan, problems_of

QLORA = ("model.lora.rank=4", "model.lora.quantize=nf4")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def of(weights: Path, *words: str) -> tuple[str, ...]:
    return f"model.init_from={weights}", *words


def test_zero_3_is_refused_with_a_way_out(weights: Path) -> None:
    (problem,) = problems_of({"zero_optimization": {"stage": 3}}, *of(weights, *QLORA))
    assert "model.lora.quantize is 'nf4' (command line)" in problem
    assert "but ZeRO 3 divides weights" in problem
    assert "use zero_optimization.stage=2" in problem


@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_divided_models_are_refused(axis: str, weights: Path) -> None:
    ds = {
        "pipeline": {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2},
        "tensor": {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}},
    }[axis]
    problems = problems_of(ds, *of(weights, *QLORA), ranks=2)
    assert any("model.lora.rank is 4" in problem and axis in problem for problem in problems)


def test_keys_without_what_they_are_for(weights: Path) -> None:
    words = of(weights, "model.lora.rank=4", "model.lora.double_quantize=false")
    (problem,) = problems_of({}, *words)
    assert 'no weights are quantized: set model.lora.quantize="nf4"' in problem
    (problem,) = problems_of({}, *of(weights, "model.lora.quantize=fp4"))
    assert "there are no adapters without a rank" in problem
    (problem,) = problems_of({}, *of(weights, "model.lora.rank=4", "model.lora.quantize=int4"))
    assert "model.lora.quantize" in problem
    assert "nf4" in problem


def test_a_missing_package_is_named_with_the_command(
    weights: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec

    def without(name: str, *more: object) -> object:
        return None if name == "bitsandbytes" else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    (problem,) = problems_of({}, *of(weights, *QLORA))
    assert "pip install bitsandbytes" in problem


def test_the_plan_says_how_many_are_in_4_bits(weights: Path) -> None:
    text = describe(plan({}, *of(weights, *QLORA)))
    assert "all frozen, 27,648 of them in 4 bits (nf4, scales in 8); adapters of rank 4" in text


def test_7b_in_4_bits_fits_24_gib() -> None:
    def made(*words: str) -> Plan:
        return plan({}, "model.name=llama-2-7b", "model.init_from=llama-2-7b", *words)

    def gib(plan: Plan, component: str) -> float:
        assert plan.estimate is not None
        parts = [part for part in plan.estimate.worst.parts if part.component == component]
        return sum(part.bytes for part in parts) / 2**30

    lora, qlora = made("model.lora.rank=16"), made("model.lora.rank=16", QLORA[1])
    assert gib(lora, "dequantized weight") == 0
    # 6.48e9 weights at 4.127 bits (QLoRA, section 3), 0.26e9 and the adapters as they were.
    count = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    saved = count * (4 * 8 / 8 - bits / 8) / 2**30  # fp32 on CPUs
    assert gib(lora, "parameters") - gib(qlora, "parameters") == pytest.approx(saved, rel=1e-3)
    assert gib(qlora, "dequantized weight") == pytest.approx(4096 * 11008 * 4 / 2**30, rel=0.02)
