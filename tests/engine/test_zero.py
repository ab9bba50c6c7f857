"""Steps of the real engine on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.config.ds_file import read_ds_json
from tests.shipped import DS_CONFIGS, fewest_ranks

pytestmark = pytest.mark.slow

# zero3_nvme needs a library that may not be here: tests/plan/test_swap_space.py.
SHIPPED = sorted(
    path.stem
    for path in DS_CONFIGS.glob("*.json")
    if fewest_ranks(read_ds_json(path)) <= 2 and path.stem != "zero3_nvme"
)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_by_value_clamps_every_element(
    stage: int, result: Callable[[str], list[Any]]
) -> None:
    for rank in result("clip_by_value_at_every_stage"):
        found = rank[stage]
        assert found["clamped"] > 100
        assert found["error"] < 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_by_value_reports_the_norm_before(
    stage: int, result: Callable[[str], list[Any]]
) -> None:
    for rank in result("clip_by_value_at_every_stage"):
        assert rank[stage]["norm"] == pytest.approx(rank[stage]["true_norm"], rel=1e-5)


def test_stage_0_reports_its_grad_norm(result: Callable[[str], list[Any]]) -> None:
    for rank in result("grad_norm_of_stage_0"):
        assert rank["reported"] == pytest.approx(rank["true"], rel=1e-5)


def test_an_overflow_skips_the_step_and_halves_the_scale(
    result: Callable[[str], list[Any]],
) -> None:
    for rank in result("overflow_is_skipped"):
        assert rank == {"applied": False, "skipped": 1, "ratio": 0.5, "moved": False}


def test_the_minimum_loss_scale_ends_the_run_with_a_diagnosis(
    result: Callable[[str], list[Any]],
) -> None:
    for rank in result("minimum_loss_scale"):
        code, message = rank["ours"]
        assert code == 76
        assert "lower optim.lr" in message


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_trains(name: str, result: Callable[[str], list[Any]]) -> None:
    ranks = [rank[name] for rank in result("shipped_configs")]
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0] - 0.3


def test_offload_runs_the_optimizer_that_steps_on_the_cpu(
    result: Callable[[str], list[Any]],
) -> None:
    for rank in result("shipped_configs"):
        assert rank["zero2_offload"]["inner_optimizer"] == "DeepSpeedCPUAdam"
        assert rank["zero3_offload"]["inner_optimizer"] == "DeepSpeedCPUAdam"
