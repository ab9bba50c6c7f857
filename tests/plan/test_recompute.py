"""Activations that are computed again, or wait on the host, in a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.layout.recompute import flops_again, matrix_elements
from harness.layout.shape import Shape, flops_per_unit
from harness.layout.world import World
from harness.plan.command import Command, plan_from
from harness.plan.model_config import find_model_config
from harness.plan.plan import Plan
from tests.estimate.test_activations import FAMILIES

REPOSITORY = Path(__file__).resolve().parents[2]


def planned(*assignments: str) -> Plan:
    command = Command(
        deepspeed_path=REPOSITORY / "ds_configs/zero3.json",
        assignments=("train.steps=1", *assignments),
    )
    return plan_from(command, world=World(accelerator="cuda", gpu="h100-80"))


def refused(*assignments: str) -> str:
    with pytest.raises(ConfigError) as error:
        planned(*assignments)
    return str(error.value)


def test_every_way_is_a_plan():
    for way, value in (("selective", "selective"), ("full", "full"), ("3", 3), ("1", 1)):
        assert planned(f"model.checkpointing={way}").config.model.checkpointing == value
    plan = planned("model.checkpointing=2", "model.activation_offload=true", "model.mlp_tiles=4")
    assert plan.estimate is not None
    assert "activations: layer inputs" in plan.estimate.worst.phase("loss", "host")


@pytest.mark.parametrize("value", ["0", "-1", "some", "true", "2.5"])
def test_other_values_are_refused_in_one_sentence(value):
    assert "it must be none, selective, full, or N for every N-th layer" in refused(
        f"model.checkpointing={value}"
    )


def test_without_a_checkpoint_there_is_nothing_to_offload():
    assert "no layer is checkpointed; set model.checkpointing" in refused(
        "model.activation_offload=true"
    )


def test_tiles_are_for_dense_mlps_that_are_modules(tmp_path):
    opt = tmp_path / "config.json"
    opt.write_text(json.dumps(FAMILIES["opt"]))
    assert "the MLPs of opt models are no modules of their own; use 1" in refused(
        "model.mlp_tiles=2", f"model.name={opt}"
    )
    assert "mixtral-8x7b is a mixture of experts" in refused(
        "model.mlp_tiles=2", "model.name=mixtral-8x7b"
    )


@pytest.mark.parametrize(
    "keys",
    [
        ("model.checkpointing=selective",),
        ("model.checkpointing=full", "model.activation_offload=true"),
        ("model.mlp_tiles=2",),
    ],
)
def test_what_is_kept_by_hand_is_not_compiled(keys):
    assert f"{keys[-1].partition('=')[0]} is " in refused("model.compile=true", *keys)


def test_operations_that_are_repeated():
    shape = Shape.from_hf(find_model_config("llama-3-8b")[0])
    layer = flops_per_unit(shape, 4096)[1]
    mlp = 2 * 3 * 4096 * 14336
    assert 2 * matrix_elements(shape.body.layers[0]) == mlp
    again = {way: flops_again(shape, 4096, way)[1:4] for way in ("none", "selective", "full", 2)}
    assert again == {
        "none": [0, 0, 0],
        "selective": [0, 0, 0],
        "full": [layer // 3] * 3,
        2: [layer // 3, 0, layer // 3],
    }
    tiled = {way: flops_again(shape, 4096, way, mlp_tiles=4)[1] for way in again}
    most = mlp - mlp // 4  # all tiles but the last
    assert tiled["none"] == mlp
    assert tiled["selective"] == mlp + most
    assert tiled["full"] == layer // 3 - mlp + most + mlp
