"""Starts of runs: as a branch of another run, or from another run's weights."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.checkpoint.index import INDEX
from harness.checkpoint.manifest import MANIFEST, Checkpoint, read_manifest
from harness.checkpoint.reader import Reader
from harness.checkpoint.store import Store
from harness.checkpoint.tensor_file import write_bytes
from harness.errors import NoCheckpoint, Unusable
from harness.launch.fork_server import Zygote
from harness.launch.ranks import Outcome
from harness.run.resumption import ResumePoint
from harness.run.saving import load_into
from harness.runfolder import RunFolder
from tests.checkpoint.small import manifest
from tests.plan.plans import Planner
from tests.real_runs import SHORT_RUN, SMALL_MODEL, events
from tests.run.features import in_gate
from tests.shipped import DS_CONFIGS
from tests.tables import beside


def words(run: Path, data: list[str], *more: str, json: str = "zero2") -> list[str]:
    """Return the words of six steps, saved after every second, at a constant rate."""
    return [
        *(f"--deepspeed={DS_CONFIGS / json}.json", *SMALL_MODEL, *SHORT_RUN, *data),
        *("train.steps=6", "save.every=2", "save.keep=9", "optim.schedule=constant"),
        *(f"run.dir={run}", *more),
    ]


def lines(run: RunFolder, name: str = "loss") -> dict[int, Any]:
    return {line["step"]: line[name] for line in run.read_metrics() if name in line}


@pytest.fixture(scope="module")
def parent(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, data: list[str]) -> RunFolder:
    folder = tmp_path_factory.mktemp("parent")
    zygote.run(words(folder / "run", data), folder).succeeded()
    return RunFolder(folder / "run")


@pytest.mark.parametrize("json", ["zero3", in_gate("zero0"), in_gate("pipeline2")])
def test_a_checkpoint_is_as_large_as_was_planned(
    json: str, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    wide = ("model.overrides.vocab_size=8192", "model.overrides.hidden_size=128")
    zygote.run(words(run.path, data, *wide, json=json), tmp_path).succeeded()
    planned = (run.read_plan() or {})["estimate"]["checkpoint_gib"] * 2**30
    assert planned > 20e6
    for path in Store(run.checkpoints_dir).all():
        size = sum(file.stat().st_size for file in path.iterdir())
        assert size == pytest.approx(planned, rel=0.01)
    for event in events(run, "saved"):
        assert event["bytes"] == pytest.approx(planned, rel=0.01)


def branch(
    zygote: Zygote, folder: Path, data: list[str], source: str, *more: str
) -> tuple[Outcome, RunFolder]:
    run = folder / "branch"
    ended = zygote.run(words(run, data, f"resume.from={source}", *more), folder / "logs")
    return ended, RunFolder(run)


def test_a_branch_goes_back_and_on_with_another_learning_rate(
    parent: RunFolder, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    before = sorted(path.name for path in parent.checkpoints_dir.iterdir())
    source = f"{parent.path}@4"
    ended, run = branch(zygote, tmp_path, data, source, "optim.lr=1e-4")
    ended.succeeded()
    (event,) = events(run, "branched")
    checksum = read_manifest(parent.checkpoints_dir / "step-00000004").checksum
    assert (event["step"], event["manifest"]) == (4, checksum)
    assert [change["was"] for change in event["changes"] if change["key"] == "optim.lr"] == [3e-3]
    assert sorted(lines(run)) == [5, 6]
    assert lines(run)[5] == lines(parent)[5]  # with the same weights, before they diverge
    assert lines(run)[6] != lines(parent)[6]
    assert lines(run, "learning_rate")[5] == 1e-4
    assert sorted(path.name for path in parent.checkpoints_dir.iterdir()) == before
    # Started again, it is an independent run with nothing left to do.
    branch(zygote, tmp_path, data, source, "optim.lr=1e-4")[0].succeeded()
    assert len(events(run, "branched")) == 1
    assert len(events(run, "resumed")) == 1


def test_what_cannot_be_branched_from_is_refused(
    parent: RunFolder, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    """The dry run tests all other cases (tests/plan/test_data.py)."""
    ended, run = branch(zygote, tmp_path, data, f"{parent.path}@5")
    assert ended.codes == [77, 77], ended.output
    assert "has no step 5, only step-" in ended.output
    assert not run.path.exists()


def test_what_one_rank_misses_ends_all(
    parent: RunFolder, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    """The rank that finds its whole share waits in no collective."""
    source = RunFolder(shutil.copytree(parent.path, tmp_path / "source"))
    folder = Store(source.checkpoints_dir).at(6)
    index, saved = json.loads((folder / INDEX).read_text()), read_manifest(folder)
    del index["model.norm.weight"]
    (folder / INDEX).unlink()
    written = write_bytes(folder / INDEX, json.dumps(index).encode())
    files = [written if file.name == INDEX else file for file in saved.files]
    (folder / MANIFEST).write_bytes(replace(saved, files=files).to_bytes())
    ended, run = branch(zygote, tmp_path, data, str(source.path))
    assert ended.codes == [77, 77], ended.output
    assert "model.norm.weight" in ended.output
    assert (run.read_status() or {})["code"] == 77


@pytest.mark.parametrize("json", ["pipeline2", in_gate("zero3")])
def test_weights_alone_begin_a_new_run(
    json: str, parent: RunFolder, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    source = f"model.init_from={parent.path}"
    zygote.run(words(run.path, data, source, "eval.every=6", json=json), tmp_path).succeeded()
    (event,) = events(run, "weights")
    assert (event["step"], Path(event["path"]).name) == (0, "step-00000006")
    assert lines(run, "eval_loss")[0] == pytest.approx(lines(parent, "eval_loss")[6], rel=1e-6)
    assert sorted(lines(run)) == [1, 2, 3, 4, 5, 6]
    assert lines(run)[6] < lines(parent)[6]
    # When resumed, it continues from its own checkpoint instead of the weights.
    longer = words(run.path, data, source, "train.steps=7", json=json)
    again = zygote.run(longer, tmp_path).succeeded()
    assert events(run, "resumed")[0]["step"] == 6
    assert "resumed step-00000006 of 7 steps (6 before)\n" in again.output


def test_saving_in_the_background_changes_nothing_that_is_saved(
    parent: RunFolder, zygote: Zygote, tmp_path: Path, data: list[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    zygote.run(words(run.path, data, "save.async=true"), tmp_path).succeeded()
    assert [event["step"] for event in events(run, "saved")] == [2, 4, 6]
    for path in Store(parent.checkpoints_dir).all():
        mine, theirs = read_manifest(run.checkpoints_dir / path.name), read_manifest(path)
        assert mine.files == theirs.files
        assert mine.probe_loss == theirs.probe_loss


def test_a_manifest_says_what_it_is_of(parent: RunFolder) -> None:
    found = json.loads((parent.checkpoints_dir / "step-00000004" / "manifest.json").read_text())
    assert found["state"] == {"step": 4, "samples": 32, "tokens": 1024}
    assert found["about"]["world_size"] == 2
    assert found["engine"]["optimizer"] == {"step": 4.0}
    assert found["held_out_loss"] is None  # it was last evaluated with other weights
    last = json.loads((parent.checkpoints_dir / "step-00000006" / "manifest.json").read_text())
    assert last["held_out_loss"] > 0


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Unusable("it lacks w"), NoCheckpoint),
        (FileNotFoundError(errno.ENOENT, "it is gone"), NoCheckpoint),
        (OSError(errno.EIO, "Input/output error"), OSError),
        (torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError),
    ],
)
def test_only_incomplete_checkpoints_are_refused(error: Exception, raised: type[Exception]) -> None:
    engine: Any = mock.Mock()
    engine.restore.side_effect = error
    with mock.patch.object(Reader, "of"), pytest.raises(raised, match=str(error.args[-1])):
        load_into(engine, Checkpoint(Path("run/checkpoints/step-00000001"), manifest(1)))


@pytest.mark.parametrize(
    ("line", "about", "steps_before", "said"), beside(__file__, "resumption.toml")["rows"]
)
def test_a_resume_says_what_of_its_length_and_ranks_differs(
    line: str, about: dict[str, Any], steps_before: int | None, said: str, tmp_path: Path
) -> None:
    found = Checkpoint(tmp_path / "step-00000013", replace(manifest(13), about=about))
    point = ResumePoint(found, "resumed", steps_before=steps_before)
    text = point.text(Planner(tmp_path)(line, estimate=False), 26)
    assert text == f"resumed step-00000013 of 26 steps{said}"
