"""Architectures that the planner does not know, counted from their own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.estimate.activations import saved_for_backward
from harness.layout.shape import Shape, num_parameters
from harness.layout.world import World
from harness.models.skeleton import hf_config, skeleton
from harness.plan.command import parse_command, plan_from
from harness.plan.memory import estimate
from tests.run_tools import run_tool
from tools.memory.trace import traced_saved
from tools.memory.unknown import shape_of, traced_estimate

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
UNKNOWN = ("stablelm", "granite", "starcoder2", "cohere", "olmo", "glm")


@pytest.fixture
def plan_of(tmp_path: Path) -> Any:
    def make(config: dict[str, Any], *words: str) -> Any:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        given = [f"model.name={path}", "data.seq_len=128", "train.micro_batch=2", *words]
        return plan_from(parse_command(given), {}, World(world_size=4, accelerator="cuda"))

    return make


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_every_parameter_is_counted_and_what_is_saved_is_what_was_traced(
    model_type: str, plan_of: Any
) -> None:
    plan = plan_of({"model_type": model_type, **SIZES}, "train.global_batch=8")
    assert plan.shape is None
    found = traced_estimate(plan)
    model = skeleton(hf_config(plan.model_config), torch.float32)
    assert num_parameters(found.inputs.shape) == sum(p.numel() for p in model.parameters())
    assert len(found.inputs.shape.body.layers) == 5
    traced = traced_saved(plan.model_config, found.inputs)
    assert saved_for_backward(found.inputs) == pytest.approx(traced, rel=0.03)
    assert {part.evidence for part in found.worst.held if part.component.endswith("layers")} == {
        "traced"
    }


@pytest.mark.parametrize("more", [(), ("model.checkpointing=full",)])
def test_a_known_family_comes_to_the_same_either_way(more: tuple[str, ...], plan_of: Any) -> None:
    plan = plan_of({"model_type": "llama", **SIZES}, "train.global_batch=8", *more)
    ours, theirs = Shape.from_hf(plan.model_config), shape_of(plan.model_config)
    assert {(t.name, t.shape) for t in ours.tensors()} == {
        (t.name, t.shape) for t in theirs.tensors()
    }
    counted = estimate(plan)
    assert counted is not None
    assert traced_estimate(plan).worst.peak == pytest.approx(counted.worst.peak, rel=0.005)


def test_without_a_trace_it_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "stablelm", **SIZES}))
    refused = run_tool("estimate_memory", "--model", path, code=2)
    assert "--trace builds its class empty" in refused.stderr
    done = run_tool("estimate_memory", "--model", path, "--trace", "--json")
    found = json.loads(done.stdout)
    assert found["components"]["activations_saved"] > 0


def test_a_class_that_cannot_be_built_is_one_report(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "t5", "vocab_size": 100}))
    refused = run_tool("estimate_memory", "--model", path, "--trace", code=2)
    assert "Traceback" not in refused.stderr
