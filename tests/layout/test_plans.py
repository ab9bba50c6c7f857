"""The table of transformers' tensor, and the reader of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.layout import tensor
from harness.layout.families import FAMILIES
from harness.layout.tensor import expert_plan, pipeline_plan, tensor_plan
from tests.gates.generate_plans import OUTPUT, as_text, build_plans


@pytest.mark.gate("plan")
def test_the_table_is_what_the_installed_transformers_says() -> None:
    assert Path(tensor.__file__).with_name("plans.json") == OUTPUT
    text = OUTPUT.read_text(encoding="utf-8")
    assert text == as_text(), "run python -m tests.gates.generate_plans"
    assert len(text) < 100 * 1024


def test_the_table_holds_plans_that_were_read_in_transformers() -> None:
    """Spot checks by hand, so that a generator that finds nothing cannot pass."""
    llama = tensor_plan("llama")
    assert llama is not None
    assert llama["layers.*.self_attn.q_proj"] == "colwise"
    assert llama["layers.*.mlp.down_proj"] == "rowwise"
    assert expert_plan("llama") is None
    assert expert_plan("mixtral") == {
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
        "layers.*.mlp.experts": "ep_dispatch_experts",
    }
    assert tensor_plan("gpt_oss") is None
    stages = pipeline_plan("qwen3")
    assert stages is not None
    assert list(stages) == ["embed_tokens", "layers", "norm"]
    assert stages["layers"] == (["hidden_states", "attention_mask"], ["hidden_states"])
    for plan in (tensor_plan, expert_plan, pipeline_plan):
        assert plan("gpt2") is None
        assert plan("no such family") is None


def test_no_family_has_two_plans() -> None:
    built = build_plans()
    for kind in ("tensor", "expert", "pipeline"):
        names = [name for entry in built[kind] for name in entry["families"]]
        assert len(names) == len(set(names)) > 50


def test_a_plan_is_a_copy() -> None:
    plan = tensor_plan("llama")
    assert plan is not None
    plan.clear()
    assert tensor_plan("llama")


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if tensor_plan(name)])
def test_a_plan_names_modules_that_the_family_has(model_type: str) -> None:
    """By the names of families.toml, of which a pattern is one or a beginning."""
    modules = [module.name for module in FAMILIES[model_type].layers]
    for plan in (tensor_plan(model_type), expert_plan(model_type)):
        for pattern in plan or {}:
            name = pattern.removeprefix("layers.*.")
            assert any(f"{module}.".startswith(f"{name}.") for module in modules), pattern
