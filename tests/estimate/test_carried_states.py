"""Carried states in the estimate: those of every row of a rank, and a window's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.config.run_file import load_run_config
from harness.estimate.timeline import Estimate
from harness.layout.world import World
from harness.plan.make import make_plan

SIZES = {"vocab_size": 512, "hidden_size": 64, "recurrent_size": 96, "num_hidden_layers": 2}


@pytest.fixture
def lstm(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "recurrent", **SIZES}))
    return f"model.name={tmp_path}"


def estimated(*words: str) -> Estimate:
    batch = ["train.global_batch=24", "train.micro_batch=3", "plan.force=true"]
    run = load_run_config(None, [*batch, *words])
    estimate = make_plan(run, {"zero_optimization": {"stage": 1}}, World(0, 2, 0, 2)).estimate
    assert estimate is not None
    return estimate


@pytest.mark.gate("memory")
def test_a_rank_holds_the_states_of_all_of_its_rows(lstm: str) -> None:
    carried, plain = estimated(lstm, "train.carry_state=true").worst, estimated(lstm).worst
    row = 4 * 2 * 2 * 96  # bytes, layers, output and cell
    for phase in ("built", "between_steps", "backward_last"):
        assert carried.total(phase) - plain.total(phase) == 12 * row
    assert carried.total("forward") - plain.total("forward") == (12 + 2 * 3) * row
    assert carried.total("build") == plain.total("build")
