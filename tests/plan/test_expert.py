"""Expert parallelism in a plan: what is rejected, and what DeepSpeed never sees."""

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
from tools.proofs.models import LEARNED, SEQ_LEN

EXPERTS = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LEARNED["mixtral"]))
    return str(path)


def plan(
    model: str, ranks: int = 4, experts: int = 2, ds: Any = None, node: int = 4, **sections: Any
) -> Plan:
    section = {"model": {"name": model}, "data": {"seq_len": SEQ_LEN}}
    run = RunConfig.model_validate({**section, **sections})
    divided = {"zero_optimization": {"stage": 1}, **(ds or {})}
    divided["expert_parallel"] = {
        "enabled": True,
        "autoep_size": experts,
        **divided.get("expert_parallel", {}),
    }
    return make_plan(run, divided, World(1, ranks, 1, node, "torch", "cpu", ""))


def test_neighbours_share_the_experts_and_deepspeed_does_not_divide_again(model: str) -> None:
    made = plan(model)
    assert (made.grid.expert, made.grid.data) == (2, 4)
    assert "expert_parallel" not in made.deepspeed
    assert made.share.part(EXPERTS, (4, 48, 96)).ranges[0] == ((2, 4),)
    assert made.share.part("model.layers.0.mlp.gate.weight", (4, 48)).is_whole
    assert made.share.every("experts") == ((0, 1), (2, 3))
    assert made.share.every("expert_replicas") == ((0, 2), (1, 3))
    assert made.share.holders(EXPERTS, (4, 48, 96)) == "expert_replicas"
    assert made.share.holders("lm_head.weight", (128, 48)) == "replicas"


def test_beside_divided_tensors_experts_are_divided_by_number_and_width(model: str) -> None:
    made = plan(model, ds={"tensor_parallel": {"autotp_size": 2}})  # on rank 1: data 0, tensor 1
    assert (made.grid.expert, made.grid.tensor, made.grid.data) == (2, 2, 2)
    assert made.share.part(EXPERTS, (4, 48, 96)).ranges == (((0, 2),), ((0, 48),), ((48, 96),))
    assert made.share.every("experts") == ((0, 2), (1, 3))
    assert made.share.every("expert_parts") == ((0, 1, 2, 3),)


def test_widths_that_torch_does_not_multiply_once_divided_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({**LEARNED["mixtral"], "intermediate_size": 100}))
    assert plan(str(path)).grid.expert == 2
    problem = "intermediate_size 100, but torch multiplies fp32 experts only where it is a multiple"
    with pytest.raises(ConfigError, match=f"{problem} of 8"):  # halves of 50
        plan(str(path), ds={"tensor_parallel": {"autotp_size": 2}, "bf16": {"enabled": False}})


def test_a_section_that_is_off_divides_nothing(model: str) -> None:
    made = plan(model, ds={"expert_parallel": {"enabled": False}})
    assert made.grid.expert == 1
    assert "expert_parallel" not in made.deepspeed


def test_ranks_that_share_experts_across_nodes_are_noted(model: str) -> None:
    assert plan(model, ranks=8, experts=4, node=4).events == ()
    (note,) = plan(model, ranks=8, experts=4, node=2).events
    assert note["kind"] == "across_nodes"
    assert note["message"].startswith("expert_parallel.autoep_size is 4")


def test_every_problem_is_in_one_report_with_the_nearest_legal_sizes(model: str) -> None:
    section = {"expert_parallel": {"route_scale": 2.0}, "zero_optimization": {"stage": 0}}
    with pytest.raises(ConfigError) as raised:
        plan(model, experts=3, ds=section)
    sizes, key, stage = raised.value.problems
    assert "autoep_size is 3" in sizes
    assert "does not divide 4 experts and 4 data ranks: use 1 or 2 or 4" in sizes
    assert key.startswith("expert_parallel.route_scale is 2")
    assert "stage=0 would clip by a mean of norms" in stage


@pytest.mark.parametrize(
    ("ds", "sections", "problem"),
    [
        ({"zero_optimization": {"stage": 2, "reduce_scatter": False}}, {}, "reduce_scatter"),
        ({}, {"optim": {"name": "muon"}}, "optim.name=muon steps whole matrices: use adamw"),
        ({"use_data_before_expert_parallelism": True}, {}, "shared by neighbouring ranks"),
    ],
)
def test_what_is_not_built_is_rejected_with_the_reason(
    model: str, ds: dict[str, Any], sections: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(model, ds=ds, **sections)
    assert any(problem in text for text in raised.value.problems), raised.value.problems


def test_a_model_without_experts_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match="llama has no experts to divide: only deepseek_v2"):
        plan("tiny")
