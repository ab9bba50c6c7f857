"""A run stops before its time is up."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from harness.guard import signals as module
from harness.guard.signals import TimeLeft, as_seconds, slurm_seconds_left


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45", 45),
        ("2:03", 123),
        ("1:00:00", 3600),
        ("2-03:00:01", 183_601),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_what_slurm_writes(text: str, seconds: float | None) -> None:
    assert as_seconds(text) == seconds


def test_the_last_step_is_the_one_after_which_another_and_a_save_would_end_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    left = TimeLeft(600, save_bytes=6e9)
    needed = 2 * 20 + 1.5 * 60 + 15
    now[0] = 1600 - needed
    assert not left.is_last_step(20, 60)
    now[0] += 1
    assert left.is_last_step(20, 60)
    assert not left.is_last_step(19, 60)
    now[0] = 1000 + 600 - 200
    assert left.is_last_step(10, None)  # a save that was never timed counts two minutes
    assert not TimeLeft(None, 1).is_last_step(1e9, 1e9)


def test_a_process_outside_a_job_has_no_limit() -> None:
    assert slurm_seconds_left({}) is None


def test_newer_slurm_says_when_the_job_ends() -> None:
    left = slurm_seconds_left({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(time.time() + 100)})
    assert left == pytest.approx(100, abs=5)


@pytest.mark.parametrize(("output", "left"), [("echo 1:30", 90), ("exit 1", None)])
def test_older_slurm_is_asked(
    output: str, left: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n{output}\n")
    squeue.chmod(squeue.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert slurm_seconds_left({"SLURM_JOB_ID": "7"}) == left
