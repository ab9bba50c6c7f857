"""Optimizer settings that are refused before a device is touched."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.optim_and_schedule import GroupConfig
from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.layout.optimizer_table import (
    OPTIMIZERS,
    Group,
    Parameter,
    optimizer_groups,
)
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def plan_of(optim: dict[str, Any], stage: int = 0, **zero: Any) -> Plan:
    run = RunConfig.model_validate({"optim": optim})
    return make_plan(run, {"zero_optimization": {"stage": stage, **zero}}, World())


def problem_of(optim: dict[str, Any], stage: int = 0, **zero: Any) -> str:
    with pytest.raises(ConfigError) as error:
        plan_of(optim, stage, **zero)
    return "\n".join(error.value.problems)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_has_a_plan(name: str) -> None:
    pytest.importorskip(OPTIMIZERS[name].package or "json")
    plan = plan_of({"name": name}, 0 if name == "adafactor" else 2)
    section = plan.deepspeed["optimizer"]
    assert section["type"] == OPTIMIZERS[name].json_type
    assert {"lr", "weight_decay", *OPTIMIZERS[name].takes} <= set(section["params"])
    assert plan.estimate is not None


def test_adafactor_is_refused_where_zero_cuts_matrices_up() -> None:
    problem = problem_of({"name": "adafactor"}, 1)
    assert "rows and columns" in problem
    assert "stage=0" in problem


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_adafactor_in_half_precision_is_told_of_the_stage_that_was_written(precision: str) -> None:
    """Stage 0 runs as stage 1 there, which the user has not written."""
    ds = {"zero_optimization": {"stage": 0}, precision: {"enabled": True}}
    with pytest.raises(ConfigError) as error:
        make_plan(RunConfig.model_validate({"optim": {"name": "adafactor"}}), ds, World())
    (problem,) = error.value.problems
    assert "stage 0 (DeepSpeed JSON), which half precision runs as ZeRO 1, gives it" in problem
    assert "use zero_optimization.stage=0 in fp32" in problem


def test_eight_bit_adam_is_not_offloaded() -> None:
    pytest.importorskip("bitsandbytes")
    assert "remove zero_optimization.offload_optimizer (" in problem_of(
        {"name": "adam8bit"}, 2, **OFFLOAD
    )


def test_a_rate_that_is_never_reached_or_is_anothers_default_is_noted() -> None:
    def notes(**sections: Any) -> set[str]:
        plan = make_plan(RunConfig.model_validate(sections), {}, World())
        return {event["kind"] for event in plan.events}

    assert not notes() & {"unfinished_warmup", "learning_rate"}
    assert "unfinished_warmup" in notes(train={"steps": 19})
    assert "unfinished_warmup" not in notes(train={"steps": 20})
    assert "learning_rate" in notes(optim={"name": "lion"})
    assert "learning_rate" not in notes(optim={"name": "lion", "lr": 1e-4})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.plan.optimizer.importlib.util.find_spec", lambda name: None)
    assert "pip install bitsandbytes" in problem_of({"name": "adam8bit"})


def test_a_setting_that_the_optimizer_does_not_take_is_refused() -> None:
    assert "sgd does not take" in problem_of({"name": "sgd", "betas": [0.9, 0.99]})
    assert "adamw does not take" in problem_of({"momentum": 0.9})


def test_momentum_is_the_usual_one_where_it_is_not_given() -> None:
    for name, momentum in (("sgd", 0.0), ("momentum", 0.9), ("muon", 0.95)):
        assert plan_of({"name": name}).deepspeed["optimizer"]["params"]["momentum"] == momentum
    given = plan_of({"name": "muon", "momentum": 0.0}).deepspeed["optimizer"]
    assert given["params"]["momentum"] == 0.0


def test_sgd_with_momentum_in_the_json_is_adopted() -> None:
    ds = {"optimizer": {"type": "SGD", "params": {"momentum": 0.8}}}
    plan = make_plan(RunConfig(), ds, World())
    assert (plan.config.optim.name, plan.config.optim.momentum) == ("sgd", 0.8)
    asked = RunConfig.model_validate({"optim": {"name": "momentum"}})
    assert make_plan(asked, ds, World()).config.optim.name == "momentum"


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    problem = problem_of({"groups": [{"pattern": "lm_haed", "lr_multiplier": 2.0}]})
    assert "lm_haed" in problem
    assert "embed_tokens" in problem


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


def test_muon_leaves_embeddings_and_the_head_to_adamw() -> None:
    plan = plan_of({"name": "muon"}, 3)
    assert plan.shape is not None
    states = {held.component: held.bytes for held in _states(plan)}
    elements = sum(tensor.numel for tensor in plan.shape.tensors())
    assert 4 * elements < states["moments"] < 8 * elements


def _states(plan: Plan) -> list[Any]:
    from harness.estimate.states import model_states

    assert plan.estimate is not None
    return model_states(plan.estimate.inputs, 0)
