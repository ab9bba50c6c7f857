"""Ranks that talk in every layer belong on one node; the plan says where they are not."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.run_config import RunConfig
from harness.layout.world import World
from harness.plan.make import make_plan


def keys_noted(ds: dict[str, Any], ranks: int, local: int, model: str = "llama-3-8b") -> list[str]:
    run = RunConfig.model_validate({"model": {"name": model}, "data": {"seq_len": 64}})
    plan = make_plan(run, ds, World(0, ranks, 0, local, "torch", "cuda", ""))
    texts = [event["message"] for event in plan.events if event["kind"] == "across_nodes"]
    return [text.partition(" ")[0] for text in texts]


TENSOR, SEQUENCE = "tensor_parallel.autotp_size", "sequence_parallel_size"


@pytest.mark.parametrize(
    ("tensor", "sequence", "local", "noted"),
    [
        (4, 1, 8, []),
        (8, 1, 4, [TENSOR]),
        (4, 1, 6, [TENSOR]),
        (1, 8, 4, [SEQUENCE]),
        (2, 4, 8, []),
        (4, 4, 8, [SEQUENCE]),
        (4, 4, 16, []),
    ],
)
def test_neighbours_on_several_nodes_are_noted(
    tensor: int, sequence: int, local: int, noted: list[str]
) -> None:
    ds = {"tensor_parallel": {"autotp_size": tensor}, SEQUENCE: sequence}
    assert keys_noted(ds, 48, local) == noted


def test_experts_too() -> None:
    ds = {"expert_parallel": {"enabled": True, "autoep_size": 8}, "zero_optimization": {"stage": 1}}
    assert keys_noted(ds, 16, 8, "mixtral-8x7b") == []
    assert keys_noted(ds, 16, 4, "mixtral-8x7b") == ["expert_parallel.autoep_size"]


def test_one_node_is_never_noted() -> None:
    assert keys_noted({"tensor_parallel": {"autotp_size": 2}}, 6, 6) == []
