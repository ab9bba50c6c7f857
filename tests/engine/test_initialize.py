"""deepspeed.initialize gets the JSON of plan.json, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, SHORT_RUN, SMALL_MODEL, run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "words",
    [
        ("--deepspeed=ds_configs/zero1.json",),
        ("--deepspeed=ds_configs/zero3.json", "optim.name=lion", "ds.steps_per_print=5"),
        ("--deepspeed=ds_configs/zero1.json", "ds.pipeline.stages=2", "optim.clip_value=1"),
        ("--deepspeed=ds_configs/fp16.json", "ds.scheduler={type='WarmupLR'}"),
    ],
)
def test_the_engine_changes_nothing_of_the_plans_json(
    words: tuple[str, ...], data: list[str], tmp_path: Path
) -> None:
    arguments = (
        *SMALL_MODEL,
        *SHORT_RUN,
        *data,
        *words,
        "train.steps=1",
        f"run.dir={tmp_path}/run",
    )
    words = [word.replace("=ds_", f"={REPOSITORY}/ds_") for word in arguments]
    run_ranks([sys.executable, "-m", "tests.engine.spy", tmp_path, *words], tmp_path).succeeded()
    plan = RunFolder(tmp_path / "run").read_plan()
    assert plan is not None
    for rank in range(2):
        assert json.loads((tmp_path / f"received-{rank}").read_text()) == plan["deepspeed"]
