"""Optimizers and schedules: settings adopted from the JSON, DeepSpeed's JSON, and groups."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from harness.config.ds_json import DsJson
from harness.config.optim_and_schedule import GroupConfig
from harness.config.run_config import RunConfig
from harness.estimate.states import model_states
from harness.layout.optimizer_table import OPTIMIZERS, Group, Parameter, optimizer_groups
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.merge_settings import merge_settings
from harness.plan.plan import Draft
from tests.plan.conftest import Packages
from tests.plan.plans import Planner


def test_what_is_adopted_has_the_jsons_key_as_its_origin() -> None:
    ds = DsJson({"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}, "ds.json")
    draft = Draft(RunConfig(), ds, World())
    merge_settings(draft)
    assert draft.config.origin("optim.lr") == "ds.json: optimizer.params.lr"
    assert draft.config.origin("optim.betas") == "ds.json: DeepSpeed's default for AdamW"
    event = {"kind": "adopted", "key": "optim.lr", "value": 3e-5}
    assert draft.events[0] == {**event, "json_key": "optimizer.params.lr"}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_has_a_plan(name: str, planned: Planner) -> None:
    package = OPTIMIZERS[name].package
    if package and not find_spec(package):
        pytest.skip(f"{package} is not here")
    stage = 0 if name == "adafactor" else 2
    made = planned(f"optim.name={name} ds.zero_optimization.stage={stage}")
    section = made.deepspeed["optimizer"]
    assert section["type"] == OPTIMIZERS[name].json_type
    assert {"lr", "weight_decay", *OPTIMIZERS[name].takes} <= set(section["params"])
    assert made.estimate is not None


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["adamw", "adam", "muon", "sgd"])
def test_torchs_adam_steps_fused_on_gpus_and_deepspeeds_only_on_the_host(
    accelerator: Any, offload: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler is needed unless an optimizer is offloaded."""
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    device = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    run = RunConfig.model_validate({"optim": {"name": name}})
    ds = {"zero_optimization": {"stage": 2, **device}}
    made = make_plan(run, ds, World(accelerator=accelerator), here=True)
    params = made.deepspeed["optimizer"]["params"]
    assert params.get("torch_adam", False) is (name in ("adamw", "adam") and not offload)
    is_fused = accelerator == "cuda" and name != "sgd" and not offload
    assert params.get("fused", False) is is_fused
    assert "fallback" not in [event["kind"] for event in made.events]


def test_a_missing_package_and_an_offloaded_package_are_named(
    packages: Packages, planned: Planner
) -> None:
    offload = "ds.zero_optimization.stage=2 ds.zero_optimization.offload_optimizer.device=cpu"
    packages("bitsandbytes")
    (problem,) = planned.problems(f"optim.name=adam8bit {offload}")
    assert "remove zero_optimization.offload_optimizer" in problem
    packages("bitsandbytes", none=True)
    (problem,) = planned.problems("optim.name=adam8bit")
    assert "pip install bitsandbytes" in problem


def test_groups_follow_the_first_rule_that_fits() -> None:
    parameters = [
        Parameter("embed", matrix=False),
        Parameter("layer.q", matrix=True),
        Parameter("layer.norm", matrix=False),
        Parameter("head", matrix=True, head=True),
    ]
    rules = [
        GroupConfig(pattern="layer", lr_multiplier=0.5),
        GroupConfig(pattern="norm|head", lr_multiplier=2.0, weight_decay=0.3),
    ]
    assert optimizer_groups(parameters, 0.1, rules, muon=True) == [
        (Group(0.0), ["embed"]),
        (Group(0.1, 0.5, muon=True), ["layer.q"]),
        (Group(0.0, 0.5), ["layer.norm"]),
        (Group(0.3, 2.0), ["head"]),
    ]


def test_muon_leaves_embeddings_and_the_head_to_adamw(planned: Planner) -> None:
    made = planned("optim.name=muon ds.zero_optimization.stage=3")
    parts = model_states(made.estimate.inputs, 0)
    (moments,) = (part.bytes for part in parts if part.component == "moments")
    elements = sum(tensor.numel for tensor in made.shape.tensors())
    assert 4 * elements < moments < 8 * elements
