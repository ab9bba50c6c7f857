"""Pipeline stages at planning time, through the door of every run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.config.ds_json import DsJson
from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.stages import layers_per_stage
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.plan.text import describe


def plan(
    pipeline: dict[str, Any], *assignments: str, ranks: int = 4, stage: int = 1, **ds: Any
) -> Plan:
    json_ = {"zero_optimization": {"stage": stage}, "pipeline": pipeline, **ds}
    run = load_run_config(None, ["model.name=gpt2-124m", "data.seq_len=1024", *assignments])
    return make_plan(run, DsJson(json_, "ds.json"), World(world_size=ranks))


def problem_of(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*args, **kwargs)
    (problem,) = caught.value.problems
    return problem


@pytest.fixture
def unknown(tmp_path) -> str:
    """An architecture that the planner does not know, of 5 layers."""
    config = {"model_type": "brand_new", "hidden_size": 8, "num_hidden_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return f"model.name={tmp_path}"


def layers(made: Plan) -> tuple[int, ...]:
    assert made.stages is not None
    return layers_per_stage(made.stages)


def test_stages_are_balanced_by_time_unless_said_otherwise():
    """GPT-2's head is as much work as 4.5 of its layers; as 3.3 where they run forward twice."""
    for partition in ({}, {"partition": "best"}, {"partition": "auto"}, {"partition": "time"}):
        assert layers(plan({"stages": 3, **partition}, ranks=3)) == (5, 6, 1)
    assert layers(plan({"stages": 3}, "model.checkpointing=full", ranks=3)) == (5, 5, 2)


def test_stages_balanced_by_memory_need_least_on_the_fullest_rank():
    def peak(partition: Any) -> int:
        made = plan({"stages": 3, "partition": partition}, *settings, ranks=6)
        assert made.estimate is not None
        return made.estimate.worst.peak

    settings = ("train.micro_batch=2", "train.global_batch=16")
    splits = [[a, b, 12 - a - b] for a in range(1, 11) for b in range(1, 12 - a)]
    assert peak("memory") == min(map(peak, splits)) < peak("time")


def test_layers_per_stage_may_be_given():
    made = plan({"stages": 4, "partition": [3, 3.0, 3, 3]})
    assert made.stages == (0, 4, 7, 10, 14)
    assert made.grid.pipeline == 4
    assert made.to_json()["stages"] == made.stages
    assert "3, 3, 3, 3 decoder layers; each waits 33% of a step" in describe(made)


def test_without_stages_there_is_no_split():
    assert plan({}).stages is None
    assert plan({"stages": 1, "partition": [12]}).stages is None


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        ({"stages": 2, "partition": [9, 7]}, "[9, 7] holds 16 decoder layers of 12"),
        ({"stages": 2, "partition": [4, 4, 4]}, "[4, 4, 4] lists 3 stages of 2"),
        ({"partition": [6, 6]}, "[6, 6] lists 2 stages of 1"),
        ({"stages": 2, "partition": [12, 0]}, "[12, 0]: every stage holds a whole number"),
    ],
)
def test_a_split_that_is_none_names_its_key(pipeline, expected):
    assert problem_of(pipeline).startswith(f"pipeline.partition (ds.json): {expected}")


def test_a_partition_of_deepspeeds_own_is_refused():
    assert problem_of({"stages": 2, "partition": "parameters"}).startswith(
        "pipeline.partition is 'parameters' (ds.json): it must be \"time\""
    )


def test_more_stages_than_layers():
    assert problem_of({"stages": 16}, ranks=16) == (
        "pipeline.stages (ds.json): 16 pipeline stages for 12 decoder layers: every stage needs one"
    )


def test_ranks_that_the_stages_do_not_divide():
    assert "3 ranks cannot be split into pipeline 2" in problem_of({"stages": 2}, ranks=3)


def test_fewer_micro_batches_than_stages_are_noted():
    batch = ("train.global_batch=4", "train.micro_batch=2")
    (event,) = plan({"stages": 4}, *batch).events
    assert event["kind"] == "pipeline_bubble"
    assert event["message"].startswith("4 pipeline stages wait 60% of each step, with 2 micro-")
    assert plan({"stages": 2}, *batch, ranks=2).events == ()


def test_an_unknown_architecture_is_split_evenly(unknown):
    made = plan({"stages": 2}, unknown)
    assert layers(made) == (3, 2)
    assert [event["kind"] for event in made.events] == ["unknown_architecture", "even_split"]
    assert layers(plan({"stages": 2, "partition": [1, 4]}, unknown)) == (1, 4)


def test_an_unknown_number_of_layers_cannot_be_split(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brand_new"}))
    assert "does not say how many layers" in problem_of({"stages": 2}, f"model.name={tmp_path}")


def test_what_does_not_go_with_stages_is_refused():
    assert "ZeRO 2 and 3 partition gradients" in problem_of({"stages": 2}, stage=2)


def test_fp16_without_zero_runs_as_stage_1_under_stages():
    made = plan({"stages": 2}, stage=0, fp16={"enabled": True})
    assert (made.precision, made.zero_stage) == ("fp16", 1)
    assert "with fp16 DeepSpeed never scales the loss" in made.events[0]["message"]


def test_bf16_without_zero_is_right_under_stages():
    made = plan({"stages": 2}, stage=0, bf16={"enabled": True})
    assert (made.precision, made.zero_stage) == ("bf16", 0)
