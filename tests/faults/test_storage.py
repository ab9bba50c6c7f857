"""Damaged, full and read-only disks, changed data: one clear message, and nothing is lost."""

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.runfolder import RunFolder
from tests.faults.conftest import STEPS, Trial, arguments, check_survived, curve, newest
from tests.real_runs import events, fill, write_corpus
from tests.tiers import rest_in_gate


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def nest(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize(
    ("file", "damage"),
    rest_in_gate("faults", [("rank-00001-000.safetensors", flip), ("manifest.json", nest)]),
)
def test_damaged_checkpoint_is_named_and_the_previous_one_used(
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


@pytest.mark.gate("faults")
def test_run_with_only_damaged_checkpoints_never_restarts(finished: Trial) -> None:
    run = finished.run
    for path in run.checkpoints_dir.glob("step-*"):
        flip(path / "index.json")
    before = run.metrics_path.read_text()
    refused = finished.start(code=77)
    assert "index.json is damaged: its SHA-256 has changed" in refused.output
    assert run.metrics_path.read_text() == before


@pytest.mark.parametrize("background", rest_in_gate("faults", ["false", "true"]))
def test_a_full_disk_stops_the_run_and_costs_no_checkpoint(
    background: str, small_disk: Path, trial: Trial, undisturbed: RunFolder
) -> None:
    trial.path = small_disk / "run"
    words = ["save.keep=9", f"save.async={background}"]
    stopped = trial.start(*words, code=74)
    assert "could not be saved" in stopped.output
    assert "free space or lower save.keep" in stopped.output
    run = trial.run
    trial.failed(74)
    assert not list(run.checkpoints_dir.glob(".unfinished*"))
    assert newest(run).name == "step-00000006"
    shutil.rmtree(run.checkpoints_dir / "step-00000002")
    trial.go_on(undisturbed, *words)


@pytest.mark.gate("faults")
def test_a_disk_may_fill_in_a_save(small_disk: Path, trial: Trial, undisturbed: RunFolder) -> None:
    stopped = trial.fill(small_disk, at="after the room was checked", rank=1, nth=2)
    assert "No space left on device" in stopped.output
    trial.go_on(undisturbed)


@pytest.mark.gate("faults")
def test_read_only_disk_is_reported(small_disk: Path, trial: Trial, undisturbed: RunFolder) -> None:
    trial.path.mkdir()
    trial.run.checkpoints_dir.symlink_to(small_disk)  # the lock is held open elsewhere
    fault = {"at": "before a save", "do": "readonly", "mount": str(small_disk)}
    stopped = trial.start(code=74, rank=0, nth=2, **fault)
    assert "Read-only file system" in stopped.output
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    trial.go_on(undisturbed)


def test_changed_data_is_refused(finished: Trial, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", documents=150)
    refused = finished.start(f"data.path={corpus}", "resume.allow=data.path", code=2)
    assert "data_fingerprint is" in refused.output


@pytest.fixture
def pair(trial: Trial) -> Path:
    """Return the .bin of a pair that the trial now trains on: its own tokens."""
    cache = Path(trial.data[1].removeprefix("data.cache_dir="))

    def first_built(name: str) -> Path:
        folders = (folder for folder in cache.glob(f"{name}-*") if folder.is_dir())
        return min(folders, key=lambda folder: folder.stat().st_mtime_ns)

    tokens, tokenizer = first_built("tokens"), first_built("tokenizer")
    for suffix in ("bin", "idx"):
        shutil.copy(tokens / f"tokens.{suffix}", trial.path.parent / f"pair.{suffix}")
    path = trial.path.parent / "pair.bin"
    trial.data = [f"data.path={path}", f"data.tokenizer={tokenizer}", trial.data[1]]
    return path


@pytest.mark.gate("faults")
def test_token_ids_that_are_replaced_in_place_are_refused(pair: Path, trial: Trial) -> None:
    """Every id except the separator changes, in a file of the same size with the same .idx."""
    first = trial.start("train.steps=2")
    assert f"data           {pair.with_suffix('')}: 200 documents, " in first.output
    assert " are held out; the first begins '" in first.output
    ids = np.fromfile(pair, np.uint16)
    np.where(ids == 2, ids, 7).astype(np.uint16).tofile(pair)
    refused = trial.start(code=2)
    assert "data_fingerprint is" in refused.output
    assert "documents, token ids or tokenizer have changed" in refused.output
    trial.start("resume.allow=data_fingerprint")
    (resumed,) = events(trial.run, "resumed")
    assert "data_fingerprint" in [change["key"] for change in resumed["changes"]]


@pytest.mark.gate("faults")
def test_held_out_set_without_targets_is_rejected_at_start(
    trial: Trial, write_jsonl: Callable[..., Path]
) -> None:
    """One prompt fills everything that an evaluation reads."""
    values = [{"prompt": "a prompt of many words " * 3000, "completion": "x"} for _ in range(2)]
    tokenizer = next(Path(trial.data[1].partition("=")[2]).glob("tokenizer-*[!k]"))
    more = (f"data.path={write_jsonl(*values)}", f"data.tokenizer={tokenizer}")
    more = (*more, "data.packing=stream")
    refused = trial.start(*more, code=2)
    assert "the 8 held-out windows contain no target, only prompts: raise eval" in refused.output
    assert not trial.path.exists()


@pytest.mark.gate("faults")
def test_a_file_of_tokens_that_shrinks_is_named_by_all_ranks(
    pair: Path, trial: Trial, undisturbed: RunFolder
) -> None:
    whole, half = pair.read_bytes(), pair.stat().st_size // 2
    fault = {"at": "reading a step's batches", "nth": 5, "do": "truncate", "file": str(pair)}
    ended = trial.zygote.run(arguments(trial.path, trial.data), trial.logs, fault)
    said = (
        f"{pair} changed while the run was reading it: it has {half} bytes, but had {len(whole)} "
    )
    assert 2 in ended.codes
    assert -signal.SIGBUS not in ended.codes
    assert said in ended.output
    assert any(said in event["message"] for event in events(trial.run, "failed"))
    pair.write_bytes(whole)
    trial.start()
    assert curve(trial.run)[8] == curve(undisturbed)[8]


def test_a_second_job_in_the_folder_is_refused(finished: Trial, undisturbed: RunFolder) -> None:
    first = finished.run
    first.open()
    refused = finished.start(code=2)
    assert "is being written by process" in refused.output
    first.close()
    assert curve(finished.run) == curve(undisturbed)


@pytest.mark.gate("faults")
@pytest.mark.parametrize(
    ("place", "nth", "file"),
    [("a line of metrics", 6, "metrics.jsonl"), ("recording a save", 2, "events.jsonl")],
)
def test_records_that_cannot_be_written_stop_the_run(
    place: str, nth: int, file: str, trial: Trial, undisturbed: Any
) -> None:
    path = trial.path / file
    ended = trial.start(code=74, rank=0, at=place, nth=nth, do="full", file=str(path), nccl=True)
    assert "Traceback" not in ended.output
    assert ended.outputs[0].count(f"{path} cannot be written (No space left on device)") == 1
    assert str(path) in trial.failed(74)["message"]
    path.unlink()
    path.with_name(f"{file}.whole").rename(path)
    trial.go_on(undisturbed)


@pytest.mark.gate("faults")
@pytest.mark.parametrize("place", ["before the plan", "keeping the tokenizer"])
def test_a_run_that_cannot_write_how_it_begins(
    place: str, small_disk: Path, trial: Trial, undisturbed: Any
) -> None:
    ended = trial.fill(small_disk, at=place)
    assert "Traceback" not in ended.output
    assert "No space left on device" in ended.outputs[0]
    trial.failed(74)
    trial.go_on(undisturbed, resumed=False)
    assert (trial.run.tokenizer_dir / "tokenizer_config.json").stat().st_size


@pytest.mark.gate("faults")
def test_a_cache_without_room_is_no_mistake_of_the_config(small_disk: Path, trial: Trial) -> None:
    trial.data = [trial.data[0], f"data.cache_dir={small_disk / 'cache'}"]
    fill(small_disk)
    ended = trial.start(code=74)
    assert "Traceback" not in ended.output
    assert "cannot train: data.cache_dir: cannot use " in ended.outputs[0]
    assert "No space left on device" in ended.outputs[0]
    assert not trial.path.exists()


@pytest.mark.gate("faults")
def test_a_tokenizer_is_there_whole_or_not_at_all(trial: Trial, undisturbed: Any) -> None:
    trial.kill(0, "within the tokenizer", 1)
    assert not trial.run.tokenizer_dir.exists()
    assert list(trial.path.glob(".unfinished-*"))
    trial.go_on(undisturbed, resumed=False)
    names = {path.name for path in undisturbed.tokenizer_dir.iterdir()}
    assert {path.name for path in trial.run.tokenizer_dir.iterdir()} == names
    assert not list(trial.path.glob(".unfinished-*"))


@pytest.mark.gate("faults")
def test_what_was_trained_outlives_an_export_without_room(small_disk: Path, trial: Trial) -> None:
    words = ("save.export=true", "save.keep=1", "save.every=8")
    ended = trial.fill(small_disk, *words, at="exporting", nccl=True)
    assert "Traceback" not in ended.output
    assert f"tools/export_hf.py {trial.path}" in ended.outputs[0]
    assert newest(trial.run).name == f"step-{STEPS:08d}"
    assert trial.failed(74)["step"] == STEPS
    assert list(trial.path.glob("*export*")) == []
    before = curve(trial.run)
    trial.start(*words)
    assert (trial.run.export_dir / "model.safetensors").exists()
    assert curve(trial.run) == before


@pytest.mark.gate("faults")
def test_a_run_whose_export_differs_ends_as_the_tool_does(trial: Trial) -> None:
    ended = trial.start("save.export=true", code=77, rank=0, at="exporting", do="differ")
    assert "Traceback" not in ended.output
    assert "but the exported model has 1000" in ended.outputs[0]
    assert f"tools/export_hf.py {trial.path} --no-check exports it" in ended.outputs[0]
    assert trial.failed(77)["step"] == STEPS
    assert list(trial.path.glob("*export*")) == []


@pytest.mark.gate("faults")
def test_damaged_records_do_not_keep_a_run_from_going_on(finished: Trial, undisturbed: Any) -> None:
    run = finished.run
    run.status_path.write_text('{"outcome": "don')
    run.plan_path.write_text("")
    (run.path / "lock").write_bytes(b"\xff\xfe")
    with run.metrics_path.open("a") as file:
        file.write("\0\0\0\n")
    ended = finished.start()
    assert "Traceback" not in ended.output
    for path in (run.status_path, run.plan_path):
        assert f"ignored, not needed: {path}" in ended.outputs[0]
    assert curve(run) == curve(undisturbed)
    assert (run.read_status() or {})["attempt"] == 2
