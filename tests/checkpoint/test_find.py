"""A run goes on from the newest checkpoint whose every byte is as it was written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.checkpoint.manifest import TrainState, read_manifest
from harness.checkpoint.store import checkpoint_of, is_run, newest_usable, verified
from harness.errors import Unusable
from tests.checkpoint.small import manifest, save, weights


def test_the_newest_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 9)
    path = save(tmp_path, 10, held_out_loss=2.25).path
    newest, problems = newest_usable(tmp_path)
    assert newest is not None
    assert (newest.path, problems) == (path, [])
    assert newest.state == TrainState(10, 80, 640)
    assert newest.manifest.held_out_loss == 2.25
    assert newest.manifest.engine == manifest(10).engine
    reader = newest.reader()
    assert reader.optimizer_kinds("norm") == ["exp_avg"]
    for name, tensor in weights(10).items():
        assert torch.equal(reader.whole(name, "weight"), tensor)


FILES = ("rank-00000-000.safetensors", "probe.safetensors", "index.json", "manifest.json")


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x04
    path.write_bytes(data)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("at", [0.0, 0.31, 0.5, 0.77, 1.0])
def test_a_flipped_bit_is_found_and_the_one_before_is_used(
    tmp_path: Path, file: str, at: float
) -> None:
    before = save(tmp_path, 1).path
    flip(save(tmp_path, 2).path / file, at)
    newest, problems = newest_usable(tmp_path)
    assert newest is not None
    assert newest.path == before
    assert len(problems) == 1
    assert "step-00000002" in problems[0]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("rest", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, file: str, rest: float) -> None:
    path = save(tmp_path, 2).path / file
    path.write_bytes(path.read_bytes()[: int(rest * path.stat().st_size)])
    with pytest.raises(Unusable, match=re.escape(str(path))):
        verified(path.parent)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, 2).path / file
    path.unlink()
    with pytest.raises(Unusable, match=f"{re.escape(str(path))} is not there"):
        verified(path.parent)


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "a\nb", "rank-0.pt", ""])
def test_a_hostile_file_name_is_refused(tmp_path: Path, name: str) -> None:
    """Also where somebody made the checksum right again."""
    path = save(tmp_path, 2).path
    manifest = read_manifest(path)
    hostile = replace(manifest, files=[replace(manifest.files[0], name=name)])
    (path / "manifest.json").write_bytes(hostile.to_bytes())
    with pytest.raises(Unusable, match="which is not a checkpoint file"):
        verified(path)


def test_a_linked_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 2).path / "rank-00000-000.safetensors"
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    with pytest.raises(Unusable, match="is not a regular file"):
        verified(path.parent)


@pytest.mark.parametrize("pointer", [None, "", "garbage\n", "step-00000099\n", "../../x\n"])
def test_nobody_believes_the_pointer(tmp_path: Path, pointer: str | None) -> None:
    newest = save(tmp_path, 2).path
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    checkpoint, _ = newest_usable(tmp_path)
    assert checkpoint is not None
    assert checkpoint.path == newest


def test_a_run_and_a_step_name_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "a@run"
    for step in (3, 12):
        save(run / "checkpoints", step)
    assert is_run(str(run))
    assert is_run(f"{run}@3")
    assert not is_run(str(tmp_path))
    assert not is_run("gpt2")
    assert checkpoint_of(str(run)).state.step == 12
    assert checkpoint_of(f"{run}@3").state.step == 3
    with pytest.raises(Unusable, match="has no step 4, only step-00000003, step-00000012"):
        checkpoint_of(f"{run}@4")
