"""Lengths of evaluations: what a model, its ranks and its data cannot evaluate is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from tests.engine.small import MODEL

LONG = {**MODEL, "max_position_embeddings": 256}


def planned(folder: Path, words: list[str], ds: dict[str, int]) -> Plan:
    run = load_run_config(None, [f"model.name={folder}", "data.seq_len=64", *words])
    return make_plan(run, ds, World(world_size=2, local_world_size=2))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["eval.seq_len=512"], "has 256 positions: use 256 at most"),
        (["eval.seq_len=8"], "it must be at least data.seq_len, which is 64"),
        (["eval.needle_lengths=[128, 512]"], "use 256 at most, or extend them by model.context"),
        (["eval.needle_lengths=[129]", "ds"], "2 sequence ranks cannot divide it"),
        (["eval.needle_lengths=[64]"], "eval.needle_lengths"),
        (["eval.needle_lengths=[128, 128]"], "names a length twice"),
        (["eval.seq_len=128", "data.batching=length_grouped"], "cuts no text into windows"),
    ],
)
def test_lengths_that_cannot_be_evaluated_are_named(
    words: list[str], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LONG))
    ds = {"sequence_parallel_size": 2} if "ds" in words else {}
    words = [word for word in words if word != "ds"]
    with pytest.raises(ConfigError, match="eval") as caught:
        planned(tmp_path, words, ds)
    assert problem in str(caught.value)


def test_longer_lengths_are_planned_where_positions_reach_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LONG))
    words = ["eval.seq_len=512", "eval.needle_lengths=[128, 512]"]
    made = planned(tmp_path, [*words, "model.context=512"], {})
    assert made.config.eval.needle_lengths == [128, 512]
