"""Tensor parallelism in a plan: what is rejected, and what DeepSpeed never sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan


def plan(ranks: int = 2, tensor: int = 2, ds: Any = None, **sections: Any) -> Plan:
    run = RunConfig.model_validate({"model": {"name": "tiny"}, **sections})
    divided = {"tensor_parallel": {"autotp_size": tensor}, **(ds or {})}
    return make_plan(run, divided, World(0, ranks, 0, ranks, "torch", "cpu", ""))


def test_the_ranks_are_divided_and_deepspeed_does_not_divide_again() -> None:
    made = plan(ranks=4)
    assert (made.grid.tensor, made.grid.data) == (2, 2)
    assert "tensor_parallel" not in made.deepspeed
    assert made.share.part("lm_head.weight", (8192, 192)).shape == (4096, 192)


def test_the_ranks_of_a_stage_divide_it() -> None:
    made = plan(ranks=8, ds={"pipeline": {"stages": 2}})
    assert (made.grid.pipeline, made.grid.data, made.grid.tensor) == (2, 2, 2)
    assert made.stages is not None
    assert made.estimate is not None


def test_stages_send_whole_states_where_ranks_cannot_divide_them_evenly() -> None:
    stages = {"pipeline": {"stages": 2}}
    even = plan(ranks=4, ds=stages)
    assert (even.deepspeed["pipeline"], even.events) == (stages["pipeline"], ())
    odd = {"name": "tiny", "overrides": {"hidden_size": 190, "head_dim": 32}}
    assert plan(ranks=4, ds=stages, model=odd).events == ()
    odd["overrides"]["hidden_size"] = 189
    uneven = plan(ranks=4, ds=stages, model=odd)
    sent = {"pipe_partitioned": False, "grad_partitioned": False}
    assert uneven.deepspeed["pipeline"] == {"stages": 2, **sent}
    assert {event["json_key"] for event in uneven.events} == {f"pipeline.{key}" for key in sent}
    only_one = {"pipeline": {"stages": 2, "pipe_partitioned": False}}
    with pytest.raises(ConfigError, match=r"pipeline\.grad_partitioned is not: give both the same"):
        plan(ranks=4, ds=only_one)


@pytest.mark.parametrize(
    ("ranks", "tensor", "sections", "problem"),
    [
        (3, 3, {}, "2 key heads cannot be divided over 3, nor be shared (and 20 like it): use 1"),
        (2, 2, {"optim": {"name": "muon"}}, "optim.name=muon steps whole matrices: use adamw"),
        (
            2,
            2,
            {"model": {"name": "tiny", "attention_dropout": 0.1, "compile": True}},
            "attention_dropout is drawn by each rank for its heads, without model.compile",
        ),
        (2, 2, {"model": {"name": "tiny", "kernels": "liger"}}, "model.kernels=liger: remove one"),
    ],
)
def test_what_cannot_be_divided_is_rejected_before_a_device_is_touched(
    ranks: int, tensor: int, sections: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel\.autotp_size") as raised:
        plan(ranks, tensor, **sections)
    assert any(problem in text for text in raised.value.problems), raised.value.problems


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout is drawn by its own code, alike for every"),
        ({"slow_but_exact": True, "pretraining_tp": 2}, "reads weights past their modules: set it"),
    ],
)
def test_what_bloom_computes_by_itself_is_rejected(
    keys: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(model={"name": bloom(tmp_path, keys)})
    assert any(problem in text for text in raised.value.problems), raised.value.problems


def test_slow_but_exact_does_nothing_without_pretraining_tp(tmp_path: Path) -> None:
    assert plan(model={"name": bloom(tmp_path, {"slow_but_exact": True})}).grid.tensor > 1


def bloom(folder: Path, keys: dict[str, Any]) -> str:
    config = folder / "config.json"
    sizes = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}
    config.write_text(json.dumps({"model_type": "bloom", **sizes, **keys}))
    return str(config)
