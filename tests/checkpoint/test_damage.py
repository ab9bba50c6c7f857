"""A run resumes from the newest checkpoint that is whole and right in every part."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save as to_safetensors

from harness.checkpoint.manifest import TrainState, _checksum
from harness.checkpoint.reader import Reader
from harness.checkpoint.store import checkpoint_of, newest_usable, verified
from harness.errors import Unusable
from harness.plan.weights import has_checkpoints
from tests.checkpoint.small import manifest, put, save, weights
from tests.tables import beside

TABLES = beside(__file__, "damaged.toml")
DAMAGED = TABLES["rows"]


def test_newest_checkpoint_loads_as_saved(tmp_path: Path) -> None:
    save(tmp_path, 9)
    path = save(tmp_path, 10, held_out_loss=2.25).path
    newest, problems = newest_usable(tmp_path)
    assert (newest.path, problems) == (path, [])
    assert newest.state == TrainState(10, 80, 640)
    assert newest.manifest.held_out_loss == 2.25
    assert newest.manifest.engine == manifest(10).engine
    reader = Reader.of(newest)
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
def test_a_flipped_bit_is_found_and_the_one_before_is_used(tmp_path, file: str, at: float) -> None:
    before = save(tmp_path, 1).path
    flip(save(tmp_path, 2).path / file, at)
    newest, problems = newest_usable(tmp_path)
    assert newest.path == before
    assert len(problems) == 1
    assert "step-00000002" in problems[0]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("rest", [None, 0.0, 0.5, 0.99])
def test_a_missing_or_truncated_file_is_named(tmp_path, file: str, rest: float | None) -> None:
    path = save(tmp_path, 2).path / file
    data = path.read_bytes()
    path.unlink()
    if rest is not None:
        path.write_bytes(data[: int(rest * len(data))])
    cut = "" if file == "manifest.json" else r" has \d+ bytes instead of \d+"
    problem = re.escape(str(path)) + (" is not there" if rest is None else cut)
    with pytest.raises(Unusable, match=problem):
        verified(path.parent)


@pytest.mark.parametrize("pointer", [None, "", "garbage\n", "step-00000099\n", "../../x\n"])
def test_latest_pointer_is_not_trusted(tmp_path: Path, pointer: str | None) -> None:
    newest = save(tmp_path, 2).path
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    checkpoint, _ = newest_usable(tmp_path)
    assert checkpoint.path == newest


def test_a_run_and_a_step_name_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "a@run"
    for step in (3, 12):
        save(run / "checkpoints", step)
    assert has_checkpoints(str(run))
    assert has_checkpoints(f"{run}@3")
    assert not has_checkpoints(str(tmp_path))
    assert not has_checkpoints("gpt2")
    assert checkpoint_of(str(run)).state.step == 12
    assert checkpoint_of(f"{run}@3").state.step == 3
    with pytest.raises(Unusable, match="has no step 4, only step-00000003, step-00000012"):
        checkpoint_of(f"{run}@4")


@pytest.mark.parametrize("file", FILES)
def test_unreadable_file_raises_and_discards_no_checkpoint(tmp_path: Path, file: str) -> None:
    save(tmp_path, 1)
    path, open_ = save(tmp_path, 2).path, os.open

    def fails(opened: Path, *flags: int) -> int:
        if opened == path / file:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return open_(opened, *flags)

    with mock.patch("os.open", fails), pytest.raises(OSError, match="step-00000002") as caught:
        newest_usable(tmp_path)
    assert caught.value.errno == errno.ESTALE
    newest, problems = newest_usable(tmp_path)
    assert (newest.path, problems) == (path, [])


def test_io_error_of_lstat_is_not_reported_as_missing_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    with mock.patch.object(Path, "lstat", side_effect=error), pytest.raises(OSError, match="error"):
        newest_usable(tmp_path)


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """Return the newer of two checkpoints."""
    save(tmp_path, 1)
    return save(tmp_path, 2).path


def passed_over(newest: Path) -> str:
    """Return the reason why the newest was not used; assert that the previous one was."""
    checkpoint, problems = newest_usable(newest.parent)
    assert checkpoint.path.name == "step-00000001"
    (problem,) = problems
    assert str(newest) in problem
    return problem


def sign(folder: Path, change: Callable[[dict[str, Any]], object] = lambda content: None) -> None:
    """Change the manifest, and recompute every size, hash and checksum."""
    path = folder / "manifest.json"
    content = json.loads(path.read_bytes())
    for file in content["files"]:
        data = (folder / file["name"]).read_bytes()
        file |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(content)
    content["checksum"] = _checksum({**content, "checksum": ""})
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in DAMAGED["manifest"] for value in values]
)
def test_a_manifest_of_other_types_is_passed_over(newest: Path, key: str, value: object) -> None:
    sign(newest, lambda content: put(content, key, value))
    assert "manifest.json" in passed_over(newest)


def test_renamed_checkpoint_is_passed_over(newest: Path) -> None:
    renamed = newest.rename(newest.with_name("step-00000009"))
    assert "contains step 2 and should be called step-00000002" in passed_over(renamed)


def test_manifest_checksum_is_verified(newest: Path) -> None:
    path = newest / "manifest.json"
    content = json.loads(path.read_text())
    content["state"]["samples"] += 1
    path.write_text(json.dumps(content))
    assert "does not match its own checksum" in passed_over(newest)


@pytest.mark.parametrize("key", ["state", "engine", "files", "probe_loss"])
def test_a_manifest_without_a_key_is_passed_over(newest: Path, key: str) -> None:
    sign(newest, lambda content: content.pop(key))
    assert f"lacks {key}" in passed_over(newest)


@pytest.mark.parametrize("name", ["index.json", "probe.safetensors"])
def test_a_file_that_the_manifest_leaves_out_is_missed(newest: Path, name: str) -> None:
    def leave_out(content: dict[str, Any]) -> None:
        content["files"] = [file for file in content["files"] if file["name"] != name]

    sign(newest, leave_out)
    assert f"does not list {name}" in passed_over(newest)


@pytest.mark.parametrize(("pieces", "reason"), DAMAGED["pieces"])
def test_index_with_gaps_or_overlaps_is_skipped(newest: Path, pieces: object, reason: str) -> None:
    index = json.loads((newest / "index.json").read_bytes())
    index["embed"]["at"] = pieces
    (newest / "index.json").write_text(json.dumps(index))
    sign(newest)
    problem = passed_over(newest)
    assert reason in problem
    assert "embed" in problem or "the manifest does not list" in problem


NO_MANIFESTS = (DEEP, b"", b"7", b"null", b"[]", b'{"a": ', b"\xff\xfe", b"9" * 9999)
NO_INDICES = (DEEP, b"[]", b"7", b'{"w": 7}', b'{"w": {}}', b'{"w": {"shape": "x"}}', b"{")
IDS = torch.arange(4).view(1, 4)
NO_BATCHES = (
    *(b"", b"no tensors at all", DEEP),
    to_safetensors({"input_ids": IDS[:0], "labels": IDS[:0].clone()}),
    to_safetensors({"input_ids": IDS, "labels": IDS.clone()})[:-8],
    *(to_safetensors({n: torch.tensor(v) for n, v in row.items()}) for row in TABLES["batches"]),
)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *(("manifest.json", data) for data in NO_MANIFESTS),
        *(("index.json", data) for data in NO_INDICES),
        *(("probe.safetensors", data) for data in NO_BATCHES),
    ],
)
def test_a_file_of_another_make_is_passed_over(newest: Path, name: str, data: bytes) -> None:
    (newest / name).write_bytes(data)
    if name != "manifest.json":
        sign(newest)
    assert name in passed_over(newest)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_only_regular_files_are_opened(newest: Path, name: str, kind: str) -> None:
    path = newest / name
    path.rename(newest.parent / "elsewhere")
    if kind == "link":
        path.symlink_to(newest.parent / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        try:
            os.mknod(path, 0o020644, os.makedev(1, 5))  # like /dev/zero
        except PermissionError:
            pytest.skip("making a device needs rights that this process lacks")
    problem = passed_over(newest)
    assert name in problem
    assert name == "manifest.json" or "is not a regular file" in problem


def test_a_checkpoint_that_is_a_link_is_none(newest: Path) -> None:
    newest.rename(newest.parent / "elsewhere")
    newest.symlink_to(newest.parent / "elsewhere")
    checkpoint, problems = newest_usable(newest.parent)
    assert (checkpoint.path.name, problems) == ("step-00000001", [])
