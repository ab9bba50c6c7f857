"""Damage on disk, full and read-only disks, folders that belong to others, changed data."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.checkpoint.manifest import read_manifest
from harness.runfolder import RunFolder
from tests.faults.checks import check_survived, curve, newest
from tests.faults.conftest import STEPS, Trial
from tests.two_ranks import events, write_corpus

pytestmark = pytest.mark.slow


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FILES = ["rank-00001-000.safetensors", "index.json", "manifest.json", "probe.safetensors"]


@pytest.mark.fault("a flipped bit, a truncated or a lost file")
@pytest.mark.parametrize(
    ("file", "damage"),
    [*((file, flip) for file in FILES), (FILES[0], cut), (FILES[2], cut), (FILES[0], Path.unlink)],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    file: str, damage: Callable[[Path], None], finished: Trial, undisturbed: RunFolder
) -> None:
    damaged = newest(finished.run)
    damage(damaged / file)
    again = finished.start()
    (event,) = events(finished.run, "unusable_checkpoint")
    assert damaged.name in event["message"]
    assert damaged.name in again.output
    check_survived(finished.run, undisturbed)
    (resumed,) = events(finished.run, "resumed")
    assert resumed["step"] == STEPS - 2


@pytest.mark.fault("no checkpoint that can be used")
def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over(finished: Trial) -> None:
    run = finished.run
    for path in run.checkpoints_dir.glob("step-*"):
        flip(path / FILES[1])
    before = run.metrics_path.read_text()
    refused = finished.start(code=77)
    assert "index.json is damaged: its SHA-256 is not the manifest's" in refused.output
    assert run.metrics_path.read_text() == before


@pytest.mark.fault("`latest` empty, garbage or absent")
@pytest.mark.parametrize("text", ["", "garbage", "step-00000099", None])
def test_a_broken_pointer_changes_nothing(text: str | None, finished: Trial) -> None:
    run = finished.run
    pointer = run.checkpoints_dir / "latest"
    pointer.unlink()
    if text is not None:
        pointer.write_text(text)
    before = curve(run)
    finished.start()
    assert events(run, "resumed")[-1]["step"] == STEPS
    assert curve(run) == before


@pytest.mark.fault("weights that do not give the loss that was saved")
def test_weights_that_compute_something_else_are_refused(finished: Trial) -> None:
    """All files are as they were saved; what the model makes of them is not."""
    manifest = read_manifest(newest(finished.run))
    off = replace(manifest, probe_loss=manifest.probe_loss + 0.01)
    (newest(finished.run) / "manifest.json").write_bytes(off.to_bytes())
    refused = finished.start(code=77)
    assert "resume.allow=probe goes on anyway" in refused.output


@pytest.mark.fault("a step that is not the folder's")
def test_a_renamed_checkpoint_is_refused(finished: Trial) -> None:
    newest(finished.run).rename(finished.run.checkpoints_dir / "step-00000009")
    finished.start()
    (event,) = events(finished.run, "unusable_checkpoint")
    assert "step-00000009 says that it is of step 8" in event["message"]


@pytest.mark.fault("a full disk")
@pytest.mark.parametrize("background", ["false", "true"])
def test_a_full_disk_stops_the_run_and_costs_no_checkpoint(
    background: str, small_disk: Path, trial: Trial, undisturbed: RunFolder
) -> None:
    trial.path = small_disk / "run"
    words = ["save.keep=9", f"save.async={background}"]
    stopped = trial.start(*words, code=74)
    assert "could not be saved" in stopped.output
    assert "make room, or lower save.keep" in stopped.output
    run, status = trial.run, trial.run.read_status() or {}
    assert (status["outcome"], status["code"]) == ("failed", 74)
    assert not list(run.checkpoints_dir.glob(".unfinished*"))
    assert newest(run).name == "step-00000006"
    shutil.rmtree(run.checkpoints_dir / "step-00000002")
    trial.start(*words)
    check_survived(run, undisturbed)


@pytest.mark.fault("no room although the check saw some")
def test_a_disk_that_fills_up_during_a_save(
    small_disk: Path, trial: Trial, undisturbed: RunFolder
) -> None:
    trial.path = small_disk / "run"
    fault = {"at": "after the room was checked", "do": "fill", "mount": str(small_disk)}
    stopped = trial.start(code=74, rank=1, nth=2, **fault)
    assert "No space left on device" in stopped.output
    (small_disk / "filler").unlink()
    trial.start()
    check_survived(trial.run, undisturbed)


@pytest.mark.fault("a read-only file system")
def test_a_read_only_file_system(small_disk: Path, trial: Trial, undisturbed: RunFolder) -> None:
    trial.path.mkdir()
    trial.run.checkpoints_dir.symlink_to(small_disk)  # the lock is held open elsewhere
    fault = {"at": "before a save", "do": "readonly", "mount": str(small_disk)}
    stopped = trial.start(code=74, rank=0, nth=2, **fault)
    assert "Read-only file system" in stopped.output
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    trial.start()
    check_survived(trial.run, undisturbed)


@pytest.mark.fault("no room for a single checkpoint")
def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    small_disk: Path, trial: Trial
) -> None:
    (small_disk / "filler").write_bytes(bytes(5_000_000))
    trial.path = small_disk / "run"
    refused = trial.start(code=2)
    assert "a checkpoint needs 0.00 GiB, but" in refused.output


@pytest.mark.fault("changed data")
def test_changed_data_is_refused(finished: Trial, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", documents=150)
    refused = finished.start(f"data.path={corpus}", "resume.allow=data.path", code=2)
    assert "data_fingerprint is" in refused.output


@pytest.mark.fault("two jobs in one folder")
def test_a_second_job_in_the_folder_is_refused(finished: Trial, undisturbed: RunFolder) -> None:
    first = finished.run
    first.open()
    refused = finished.start(code=2)
    assert "is being written by process" in refused.output
    first.close()
    assert curve(finished.run) == curve(undisturbed)
