"""A run with a kind of attention: trained, verified, resumed with the same alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.runfolder import RunFolder
from tests.two_ranks import events, run_ranks, train_command


@pytest.mark.slow
def test_a_run_with_a_kind_resumes_with_it_alone(tmp_path: Path, data: list[str]) -> None:
    run = RunFolder(tmp_path / "kind" / "run")
    words = (
        *data,
        f"run.dir={run.path}",
        "data.document_mask=true",
        "model.attention=longformer",
        "model.attention_window=16",
        "model.checkpointing=selective",
        "ds.pipeline.stages=2",
        "save.every=2",
    )
    run_ranks(train_command(*words, "train.steps=2"), run.path.parent).succeeded()
    assert events(run, "verified")
    run_ranks(train_command(*words, "train.steps=3"), run.path.parent).succeeded()
    losses = [line["loss"] for line in run.read_metrics() if "loss" in line]
    assert len(losses) == 3
    other = run_ranks(train_command(*words, "model.attention_window=8"), run.path.parent)
    assert other.codes == [2, 2]
    assert "attention_window is 8, but the run in this folder has 16" in other.outputs[0]
