"""A disk that is full outside of a save: code 74 on all ranks, one clear message, nothing lost."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.faults.checks import check_survived, curve, newest
from tests.faults.conftest import STEPS, Trial


@pytest.mark.gate("faults")
@pytest.mark.fault("a full disk between two saves")
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
    status = trial.run.read_status() or {}
    assert (status["outcome"], status["code"]) == ("failed", 74)
    assert str(path) in status["message"]
    path.unlink()
    path.with_name(f"{file}.whole").rename(path)
    trial.start()
    check_survived(trial.run, undisturbed)


@pytest.mark.gate("faults")
@pytest.mark.fault("a full disk while the run begins")
@pytest.mark.parametrize("place", ["before the plan", "keeping the tokenizer"])
def test_a_run_that_cannot_write_how_it_begins(
    place: str, small_disk: Path, trial: Trial, undisturbed: Any
) -> None:
    ended = trial.fill(small_disk, at=place)
    assert "Traceback" not in ended.output
    assert "No space left on device" in ended.outputs[0]
    assert (trial.run.read_status() or {})["code"] == 74
    trial.start()
    check_survived(trial.run, undisturbed, resumed=False)
    assert (trial.run.tokenizer_dir / "tokenizer_config.json").stat().st_size


@pytest.mark.gate("faults")
@pytest.mark.fault("a full disk under the data's cache")
def test_a_cache_without_room_is_no_mistake_of_the_config(small_disk: Path, trial: Trial) -> None:
    trial.data = [trial.data[0], f"data.cache_dir={small_disk / 'cache'}"]
    with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    ended = trial.start(code=74)
    assert "Traceback" not in ended.output
    assert "cannot train: data.cache_dir: cannot use " in ended.outputs[0]
    assert "No space left on device" in ended.outputs[0]
    assert not trial.path.exists()


@pytest.mark.gate("faults")
@pytest.mark.fault("a kill while the tokenizer is written")
def test_a_tokenizer_is_there_whole_or_not_at_all(trial: Trial, undisturbed: Any) -> None:
    trial.kill(0, "within the tokenizer", 1)
    assert not trial.run.tokenizer_dir.exists()
    assert list(trial.path.glob(".unfinished-*"))
    trial.start()
    check_survived(trial.run, undisturbed, resumed=False)
    names = {path.name for path in undisturbed.tokenizer_dir.iterdir()}
    assert {path.name for path in trial.run.tokenizer_dir.iterdir()} == names
    assert not list(trial.path.glob(".unfinished-*"))


@pytest.mark.gate("faults")
@pytest.mark.fault("a full disk at the export")
def test_what_was_trained_outlives_an_export_without_room(small_disk: Path, trial: Trial) -> None:
    words = ("save.export=true", "save.keep=1", "save.every=8")
    ended = trial.fill(small_disk, *words, at="exporting", nccl=True)
    assert "Traceback" not in ended.output
    assert f"run: python tools/export_hf.py {trial.path}" in ended.outputs[0]
    assert newest(trial.run).name == f"step-{STEPS:08d}"
    status = trial.run.read_status() or {}
    assert (status["outcome"], status["code"], status["step"]) == ("failed", 74, STEPS)
    assert list(trial.path.glob("*export*")) == []
    before = curve(trial.run)
    trial.start(*words)
    assert (trial.run.export_dir / "model.safetensors").exists()
    assert curve(trial.run) == before


@pytest.mark.gate("faults")
@pytest.mark.fault("an export with another loss")
def test_a_run_whose_export_differs_ends_as_the_tool_does(trial: Trial) -> None:
    ended = trial.start("save.export=true", code=77, rank=0, at="exporting", do="differ")
    assert "Traceback" not in ended.output
    assert "but the exported model has 1000" in ended.outputs[0]
    assert f"python tools/export_hf.py {trial.path} --no-check exports it" in ended.outputs[0]
    status = trial.run.read_status() or {}
    assert (status["outcome"], status["code"], status["step"]) == ("failed", 77, STEPS)
    assert list(trial.path.glob("*export*")) == []


@pytest.mark.fault("a file where the export goes")
def test_a_file_named_export_is_found_before_training(trial: Trial) -> None:
    trial.path.mkdir()
    trial.run.export_dir.write_text("mine")
    ended = trial.start("save.export=true", code=2)
    assert (
        f"save.export: {trial.run.export_dir} exists and is not an exported model" in ended.output
    )
    assert [path.name for path in trial.path.iterdir()] == ["export"]


@pytest.mark.gate("faults")
@pytest.mark.fault("damaged status.json, plan.json and lock")
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
