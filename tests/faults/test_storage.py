"""Damage on disk, full and read-only disks, folders that belong to others, changed data."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.runfolder import RunFolder
from tests.faults.checks import check_survived, curve, newest
from tests.faults.conftest import STEPS, arguments
from tests.two_ranks import events, write_corpus
from tests.zygote import Zygote

pytestmark = pytest.mark.slow


@pytest.fixture
def run(undisturbed: RunFolder, tmp_path: Path) -> RunFolder:
    """A finished run whose newest checkpoint is of step 8, the one before of step 6."""
    shutil.copytree(undisturbed.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


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
    file: str,
    damage: object,
    run: RunFolder,
    zygote: Zygote,
    undisturbed: RunFolder,
    tmp_path: Path,
    data: list[str],
) -> None:
    damaged = newest(run)
    damage(damaged / file)  # type: ignore[operator]
    again = zygote.run(arguments(run.path, data), tmp_path)
    assert again.codes == [0, 0], again.output
    (event,) = events(run, "unusable_checkpoint")
    assert damaged.name in event["message"]
    assert damaged.name in again.output
    check_survived(run, undisturbed)
    (resumed,) = events(run, "resumed")
    assert resumed["step"] == STEPS - 2


@pytest.mark.fault("no checkpoint that can be used")
def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over(
    run: RunFolder, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    for path in run.checkpoints_dir.glob("step-*"):
        flip(path / FILES[1])
    before = run.metrics_path.read_text()
    refused = zygote.run(arguments(run.path, data), tmp_path)
    assert refused.codes == [77, 77], refused.output
    assert "index.json is damaged: its SHA-256 is not the manifest's" in refused.output
    assert run.metrics_path.read_text() == before


@pytest.mark.fault("`latest` empty, garbage or absent")
@pytest.mark.parametrize("text", ["", "garbage", "step-00000099", None])
def test_a_broken_pointer_changes_nothing(
    text: str | None, run: RunFolder, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    pointer = run.checkpoints_dir / "latest"
    pointer.unlink()
    if text is not None:
        pointer.write_text(text)
    before = curve(run)
    again = zygote.run(arguments(run.path, data), tmp_path)
    assert again.codes == [0, 0], again.output
    assert events(run, "resumed")[-1]["step"] == STEPS
    assert curve(run) == before


@pytest.mark.fault("checkpoints of another run, step or name")
def test_a_checkpoint_of_another_model_is_refused(
    run: RunFolder, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    """Somebody copied weights of another seed into the folder, manifest and all but one file."""
    other = RunFolder(tmp_path / "other")
    made = zygote.run(arguments(other.path, data, "train.seed=1"), tmp_path)
    assert made.codes == [0, 0], made.output
    for path in run.checkpoints_dir.glob("step-*"):
        shutil.rmtree(path)
    shutil.copytree(newest(other), run.checkpoints_dir / "step-00000008")
    manifest = run.checkpoints_dir / "step-00000008" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["probe_loss"] += 0.01  # what the weights do not give
    from harness.checkpoint.manifest import _checksum

    content["checksum"] = ""
    content["checksum"] = _checksum(content)
    manifest.write_text(json.dumps(content))
    refused = zygote.run(arguments(run.path, data), tmp_path)
    assert refused.codes == [77, 77], refused.output
    assert "resume.allow=probe goes on anyway" in refused.output


@pytest.mark.fault("a step that is not the folder's")
def test_a_renamed_checkpoint_is_refused(
    run: RunFolder, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    newest(run).rename(run.checkpoints_dir / "step-00000009")
    again = zygote.run(arguments(run.path, data), tmp_path)
    assert again.codes == [0, 0], again.output
    (event,) = events(run, "unusable_checkpoint")
    assert "step-00000009 says that it is of step 8" in event["message"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB: a checkpoint of this model has 1.7."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs rights that this process lacks")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.fault("a full disk")
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_stops_the_run_and_costs_no_checkpoint(
    background: bool,
    small_disk: Path,
    zygote: Zygote,
    undisturbed: RunFolder,
    tmp_path: Path,
    data: list[str],
) -> None:
    run = RunFolder(small_disk / "run")
    words = [*arguments(run.path, data), "save.keep=9", f"save.async={str(background).lower()}"]
    stopped = zygote.run(words, tmp_path)
    assert stopped.codes == [74, 74], stopped.output
    assert "could not be saved" in stopped.output
    assert "make room, or lower save.keep" in stopped.output
    status = run.read_status() or {}
    assert (status["outcome"], status["code"]) == ("failed", 74)
    assert not list(run.checkpoints_dir.glob(".unfinished*"))
    assert newest(run).name == "step-00000006"
    shutil.rmtree(run.checkpoints_dir / "step-00000002")
    assert zygote.run(words, tmp_path).codes == [0, 0]
    check_survived(run, undisturbed)


@pytest.mark.fault("no room although the check saw some")
def test_a_disk_that_fills_up_during_a_save(
    small_disk: Path, zygote: Zygote, undisturbed: RunFolder, tmp_path: Path, data: list[str]
) -> None:
    run = RunFolder(small_disk / "run")
    fault = {"rank": 1, "at": "after the room was checked", "nth": 2, "do": "fill"}
    stopped = zygote.run(arguments(run.path, data), tmp_path, {**fault, "mount": str(small_disk)})
    assert stopped.codes == [74, 74], stopped.output
    assert "No space left on device" in stopped.output
    (small_disk / "filler").unlink()
    assert zygote.run(arguments(run.path, data), tmp_path).codes == [0, 0]
    check_survived(run, undisturbed)


@pytest.mark.fault("a read-only file system")
def test_a_read_only_file_system(
    small_disk: Path, zygote: Zygote, undisturbed: RunFolder, tmp_path: Path, data: list[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.checkpoints_dir.symlink_to(small_disk)  # the lock is held open elsewhere
    fault = {"rank": 0, "at": "before a save", "nth": 2, "do": "readonly", "mount": str(small_disk)}
    stopped = zygote.run(arguments(run.path, data), tmp_path, fault)
    assert stopped.codes == [74, 74], stopped.output
    assert "Read-only file system" in stopped.output
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert zygote.run(arguments(run.path, data), tmp_path).codes == [0, 0]
    check_survived(run, undisturbed)


@pytest.mark.fault("no room for a single checkpoint")
def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    small_disk: Path, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    (small_disk / "filler").write_bytes(bytes(5_000_000))
    refused = zygote.run(arguments(small_disk / "run", data), tmp_path)
    assert refused.codes == [2, 2], refused.output
    assert "a checkpoint needs 0.00 GiB, but" in refused.output


@pytest.mark.fault("changed data")
def test_changed_data_is_refused(
    run: RunFolder, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus", documents=150)
    words = [*arguments(run.path, data), f"data.path={corpus}", "resume.allow=data.path"]
    refused = zygote.run(words, tmp_path)
    assert refused.codes == [2, 2], refused.output
    assert "data_fingerprint is" in refused.output


@pytest.mark.fault("two jobs in one folder")
def test_a_second_job_in_the_folder_is_refused(
    run: RunFolder, zygote: Zygote, undisturbed: RunFolder, tmp_path: Path, data: list[str]
) -> None:
    first = RunFolder(run.path)
    first.open()
    refused = zygote.run(arguments(run.path, data), tmp_path)
    assert refused.codes == [2, 2], refused.output
    assert "is being written by process" in refused.output
    first.close()
    assert curve(run) == curve(undisturbed)
