"""Defaults beside given weights, and the checks of adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.world import World
from harness.models.skeleton import hf_config
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.plan.text import describe
from tests.engine.small import MODEL

SHORT = ("data.seq_len=16", "train.global_batch=8")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(hf_config(MODEL)).save_pretrained(folder)
    return folder


def plan(ds: dict[str, Any], *words: str, ranks: int = 1) -> Plan:
    world = World(world_size=ranks, local_world_size=ranks)
    return make_plan(load_run_config(None, [*SHORT, *words]), ds, world)


def problems_of(ds: dict[str, Any], *words: str, ranks: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        plan(ds, *words, ranks=ranks)
    return raised.value.problems


def test_weights_imply_shape_rate_and_length(weights: Path) -> None:
    made = plan({}, f"model.init_from={weights}")
    assert made.model_config["hidden_size"] == MODEL["hidden_size"]
    assert (made.config.optim.lr, made.config.train.epochs) == (2e-5, 1.0)
    (event,) = [event for event in made.events if event["kind"] == "fine_tuning"]
    defaults = "optim.lr=2e-05, optim.warmup_steps=0, train.epochs=1.0"
    assert f"model.name={weights}, {defaults}" in event["message"]


def test_what_the_user_says_stays(weights: Path) -> None:
    words = (f"model.init_from={weights}", f"model.name={weights}", "optim.lr=0.1", "train.steps=3")
    made = plan({}, *words)
    assert (made.config.optim.lr, made.steps) == (0.1, 3)
    assert not [event for event in made.events if event["kind"] == "fine_tuning"]


def test_what_the_json_says_stays(weights: Path) -> None:
    ds = {"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}}
    assert plan(ds, f"model.init_from={weights}").config.optim.lr == 0.25


def test_random_weights_keep_their_defaults() -> None:
    made = plan({})
    assert (made.config.optim.lr, made.steps) == (3e-3, 100)


def test_a_wrong_place_is_blamed_on_the_key_that_named_it() -> None:
    (problem,) = problems_of({}, "model.init_from=./nowhere")
    assert problem.startswith("model.init_from is './nowhere' (")


def test_adapters_are_counted_in_the_plan(weights: Path) -> None:
    made = plan({}, f"model.init_from={weights}", "model.lora.rank=4")
    assert made.config.optim.lr == 2e-4
    assert "all frozen; adapters of rank 4: 6,144, " in describe(made)
    assert made.estimate is not None
    inputs = made.estimate.inputs
    assert (inputs.trained, inputs.frozen) == (6144, sum(t.numel for t in inputs.shape.tensors()))
    assert json.loads(json.dumps(made.to_json()))["run"]["model"]["lora"]["rank"] == 4


@pytest.mark.parametrize(
    ("ds", "words", "ranks", "expected"),
    [
        ({}, ["model.lora.alpha=8"], 1, "model.lora.alpha is 8.0 (command line), but there are no"),
        ({}, ["model.lora.rank=0"], 1, "model.lora.rank is 0 (command line)"),
        ({"pipeline": {"stages": 2}}, ["model.lora.rank=4"], 2, "not divided over pipeline stages"),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            ["model.lora.rank=4"],
            2,
            "not divided over tensor-parallel ranks",
        ),
        (
            {"zero_optimization": {"stage": 3}},
            ["model.lora.rank=4", "model.lora.dora=true"],
            1,
            "DoRA reads whole weights, which ZeRO 3 divides",
        ),
        (
            {},
            ["model.lora.rank=4", 'model.lora.targets=["q_prj"]'],
            1,
            "no linear map of the decoder layers is named q_prj: they are q_proj, ",
        ),
        (
            {},
            ["model.lora.rank=4", 'optim.groups=[{pattern="embed", frozen=true}]'],
            1,
            "but all weights beside adapters are frozen",
        ),
        ({}, ["model.lora.rnk=4"], 1, "did you mean model.lora.rank?"),
        ({}, ['optim.groups=[{pattern=".", frozen=true}]'], 1, "which freezes every parameter"),
        (
            {},
            ['optim.groups=[{pattern="embed", frozen=true, lr_multiplier=0.5}]'],
            1,
            "take neither lr_multiplier nor weight_decay",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    ds: dict[str, Any], words: list[str], ranks: int, expected: str, weights: Path
) -> None:
    problems = problems_of(ds, f"model.init_from={weights}", *words, ranks=ranks)
    assert any(expected in problem for problem in problems), problems


def test_adapters_need_weights() -> None:
    (problem,) = problems_of({}, "model.lora.rank=4")
    assert problem.endswith("but adapters are learned beside given weights: set model.init_from")


@pytest.mark.parametrize(
    "ds",
    [{"pipeline": {"stages": 2}}, {"tensor_parallel": {"autotp_size": 2}}],
    ids=["stages", "tensors"],
)
def test_frozen_parameters_are_not_divided(ds: dict[str, Any]) -> None:
    (problem,) = problems_of(ds, 'optim.groups=[{pattern="embed", frozen=true}]', ranks=2)
    assert "frozen" in problem
