"""Reversible layers in a plan: families, combinations, estimate and export."""

from __future__ import annotations

import json

import pytest

from harness.models.skeleton import hf_config
from harness.plan.memory import memory_inputs
from harness.plan.text import describe
from tests.models.test_reversible import SIZES
from tests.plan.test_recompute import planned, refused

_ON = "model.reversible=true"


def test_a_plan_says_so_everywhere():
    plan = planned(_ON, "model.name=llama-3-8b")
    assert plan.model_config["reversible"] is True
    assert hf_config(plan.model_config).reversible is True
    assert "activation checkpointing: reversible" in describe(plan, elsewhere=True)
    (event,) = [event for event in plan.events if event["kind"] == "not_exported"]
    assert "the weights stay in checkpoints" in event["message"]
    assert not [e for e in planned(_ON, "save.export=false").events if e["kind"] == "not_exported"]


def test_the_estimate_is_flat_in_depth():
    kept = set()
    for layers in (2, 32):
        plan = planned(_ON, "model.name=llama-3-8b", f"model.overrides.num_hidden_layers={layers}")
        parts = plan.estimate.worst.phase("loss")
        kept.add(tuple(size for name, size in parts.items() if name.startswith("activations")))
    assert len(kept) == 1
    inputs = memory_inputs(plan)
    stream = 4 * inputs.shape.hidden_size * inputs.tokens
    assert plan.estimate.worst.phase("loss")["activations: streams"] == 2 * stream


@pytest.mark.parametrize(
    ("assignments", "problem"),
    [
        (["model.name=mixtral-8x7b"], "not mixtral: leave it out"),
        (["model.name=olmo2-7b"], "not olmo2: leave it out"),
        (["model.checkpointing=full"], "which does not go with model.checkpointing"),
        (["model.stochastic_depth=0.1"], "which does not go with model.stochastic_depth"),
        (["model.compile=true"], "which does not go with model.compile"),
        (["model.kernels=liger"], "which does not go with model.kernels"),
        (["model.lora.rank=4"], "which does not go with model.lora.rank"),
        (["model.activation_offload=true"], "no layer is checkpointed"),
        (["ds.pipeline.stages=2"], "a pipeline's stages send one stream: use ZeRO 3"),
    ],
)
def test_what_it_does_not_go_with_is_named(assignments, problem):
    assert problem in refused(_ON, *assignments)


def test_parallel_residuals_are_refused(tmp_path):
    path = tmp_path / "config.json"
    config = {"model_type": "gpt_neox", "use_parallel_residual": True, **SIZES}
    path.write_text(json.dumps(config))
    assert "set model.overrides.use_parallel_residual=false" in refused(
        _ON, f"model.name={path}", "data.seq_len=16"
    )
    override = "model.overrides.use_parallel_residual=false"
    assert (
        planned(_ON, f"model.name={path}", override, "data.seq_len=16").checkpointing
        == "reversible"
    )


def test_weights_of_another_function_are_refused(tmp_path):
    """Those of a reversible model make a reversible one, as a shape is implied."""
    plan = planned(_ON, "model.name=tiny")
    for name, config in (
        ("plain", {**plan.model_config, "reversible": False}),
        ("streams", plan.model_config),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    text = refused(_ON, f"model.init_from={tmp_path / 'plain'}")
    assert "was trained as another function of its weights" in text
    assert planned(f"model.init_from={tmp_path / 'streams'}").checkpointing == "reversible"
