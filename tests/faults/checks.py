"""Conditions that must hold after any fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.checkpoint.manifest import read_manifest
from harness.runfolder import RunFolder
from tests.faults.conftest import STEPS
from tests.real_runs import events

SAVE_EVERY = 2


def curve(run: RunFolder) -> list[tuple[Any, ...]]:
    """Return the part of each step's metrics that equals an undisturbed run's."""
    names = ("step", "loss", "grad_norm", "learning_rate", "samples", "eval_loss")
    return [tuple(line.get(name) for name in names) for line in run.read_metrics()]


def executed(run: RunFolder) -> list[int]:
    """Return the executed steps of all attempts, in order."""
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


def check_survived(
    run: RunFolder,
    undisturbed: RunFolder,
    attempts: int = 2,
    resumed: bool = True,
    lost: int = SAVE_EVERY,
) -> None:
    """Assert that the run ended tidily on the undisturbed curve, without repeating saved steps.

    `lost` is the number of steps that each attempt but the last may have done after its last save.
    """
    assert curve(run) == curve(undisturbed)
    assert (run.read_status() or {})["outcome"] == "done"
    assert (run.read_status() or {})["attempt"] == attempts
    assert len(executed(run)) <= STEPS + lost * (attempts - 1)
    found = events(run, "resumed")
    assert len(found) == (attempts - 1 if resumed else 0)
    for event in found:
        assert event["step"] > 0
        assert len(event["manifest"]) == 64
    check_tidy(run)


def check_tidy(run: RunFolder) -> None:
    """Assert that the folder contains only whole checkpoints and a pointer to the newest."""
    folders = sorted(path for path in run.checkpoints_dir.iterdir() if path.is_dir())
    assert [path.name for path in folders if path.name.startswith(".")] == []
    for path in folders:
        read_manifest(path)
    assert (run.checkpoints_dir / "latest").read_text().strip() == folders[-1].name


def newest(run: RunFolder) -> Path:
    return max(run.checkpoints_dir.glob("step-*"))
