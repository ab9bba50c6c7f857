"""Damaged, foreign and malicious folders of weights are refused by their headers."""

import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as to_safetensors

from harness.errors import ConfigError
from harness.plan.model_config import find_model_config
from harness.plan.weights import weight_file_problems
from tests.plan.plans import Planner

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n"
WHOLE = to_safetensors({"a": torch.arange(6.0), "b": torch.zeros(2, 3, dtype=torch.bfloat16)})
FILES = tomllib.loads(Path(__file__).with_name("weight_files.toml").read_text(encoding="utf-8"))
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def put_index(folder: Path, *files: object, **changes: Any) -> None:
    weight_map = {f"t{number}": file for number, file in enumerate(files)}
    index = {"metadata": {}, "weight_map": weight_map, **changes}
    (folder / INDEX).write_text(json.dumps(index))


def test_whole_safetensors_files_are_accepted(tmp_path: Path) -> None:
    (tmp_path / ONE).write_bytes(WHOLE)
    assert weight_file_problems(str(tmp_path)) == []
    (tmp_path / ONE).rename(tmp_path / "a.safetensors")
    put_index(tmp_path, "a.safetensors", "a.safetensors")
    assert weight_file_problems(str(tmp_path)) == []
    assert weight_file_problems(str(tmp_path), "a.safetensors") == []


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def tensor(dtype: object, shape: list[int], offsets: list[int]) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return header(json.dumps({"w": entry})) + b"." * max(offsets)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (POINTER, "74 bytes and is not a safetensors file: it is a git-lfs pointer; run `git"),
        (b"", "0 bytes: it is empty or truncated"),
        (WHOLE[:7], "7 bytes: it is empty"),
        (WHOLE[:40], "not a safetensors file"),
        (WHOLE[:-1], f"{len(WHOLE) - 1} bytes, but its tensors end at {len(WHOLE)}: it is trunc"),
        (WHOLE + b"x", "something follows"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (pickle.dumps({"w": 1}), "a pickle"),
        (b"PK\3\4" + bytes(99), "a pickle"),
        (b"GGUF" + bytes(99), "a GGUF"),
        (b"\xff" * 99, "unexpected bytes"),
        (header("[" * 100_000 + "]" * 100_000), "not JSON"),
        *((header(text), reason) for text, reason in FILES["headers"]),
        *((tensor(*entry), reason) for *entry, reason in FILES["tensors"]),
    ],
)
@pytest.mark.parametrize("shard", [False, True])
def test_partial_file_has_its_size(data: bytes, reason: str, shard: bool, tmp_path: Path) -> None:
    name = "model-00002-of-00002.safetensors" if shard else ONE
    if shard:
        (tmp_path / "model-00001-of-00002.safetensors").write_bytes(WHOLE)
        put_index(tmp_path, "model-00001-of-00002.safetensors", name)
    (tmp_path / name).write_bytes(data)
    (problem,) = weight_file_problems(str(tmp_path))
    assert problem.startswith(f"model.init_from is {str(tmp_path)!r}: {tmp_path / name}")
    assert reason in problem


@pytest.mark.parametrize("name", FILES["not_beside"])
@pytest.mark.parametrize("absolute", [False, True])
def test_index_names_safetensors_beside_it_alone(name: str, absolute: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in ("outside.safetensors", "model/weights.bin", "model/sub/inside.safetensors"):
        (tmp_path / place).write_bytes(WHOLE)
    put_index(folder, f"{tmp_path}/{name}" if absolute else name)
    (problem,) = weight_file_problems(str(folder))
    assert "but there is no such safetensors file beside it" in problem


@pytest.mark.parametrize("text", [*FILES["broken_index"], "[" * 100_000 + "]" * 100_000])
def test_a_broken_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(WHOLE)
    (tmp_path / INDEX).write_text(text)
    (problem,) = weight_file_problems(str(tmp_path))
    assert str(tmp_path / INDEX) in problem


@pytest.mark.parametrize("name", [ONE, "a.safetensors"])
def test_links_stay_in_their_folder_and_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    put_index(folder, "a.safetensors")
    (tmp_path / "outside").write_bytes(WHOLE)
    (folder / "inside").write_bytes(WHOLE)
    (folder / name).symlink_to(tmp_path / "outside")
    (problem,) = weight_file_problems(str(folder))
    assert f"{folder / name} is a link to {tmp_path / 'outside'}" in problem
    (folder / name).unlink()
    (folder / name).symlink_to("inside")
    assert weight_file_problems(str(folder)) == []
    (folder / name).unlink()
    os.mkfifo(folder / name)
    (problem,) = weight_file_problems(str(folder))
    assert "is not a regular file" in problem
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    (problem,) = weight_file_problems(str(folder))
    assert f"{folder / name} is a link, not a file" in problem


def test_the_cache_of_the_hub_is_made_of_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "4d7a").write_bytes(WHOLE)
    folder = tmp_path / "snapshots" / "main"
    folder.mkdir(parents=True)
    (folder / ONE).symlink_to("../../blobs/4d7a")
    assert weight_file_problems(str(folder)) == []


@pytest.mark.parametrize(("file", "reason"), FILES["told_apart"].items())
def test_kinds_of_no_safetensors_are_told_apart(file: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"x")
    (problem,) = weight_file_problems(str(tmp_path), opens=True)
    assert reason in problem
    # Where a job is planned, the weights may be missing.
    assert weight_file_problems(str(tmp_path)) == ([] if file == "README.md" else [problem])


def test_an_adapter_without_a_config_is_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds an adapter: merge it .*AutoPeftModelForCausalLM"):
        find_model_config(str(tmp_path), key="model.init_from")


@pytest.mark.parametrize("named", FILES["not_named"])
def test_a_config_names_a_safetensors_file_beside_it(named: object, tmp_path: Path) -> None:
    (tmp_path / ONE).write_bytes(WHOLE)
    (problem,) = weight_file_problems(str(tmp_path), named)
    assert "transformers_weights" in problem


def test_many_broken_shards_take_a_few_lines(tmp_path: Path) -> None:
    names = [f"model-{n:05d}-of-00030.safetensors" for n in range(30)]
    for name in names:
        (tmp_path / name).write_bytes(POINTER)
    put_index(tmp_path, *names)
    problems = weight_file_problems(str(tmp_path))
    assert len(problems) == 4
    assert "and 27 more files like these" in problems[-1]


def test_runs_and_names_of_the_hub_are_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert weight_file_problems(str(tmp_path)) == []
    assert weight_file_problems(f"{tmp_path}@1") == []


@pytest.mark.parametrize(("name", "made"), [("prefixed", "RENAMED"), ("no_index", "given")])
def test_a_command_mends_weights(name: str, made: str, planned: Planner, tmp_path: Path) -> None:
    source = shutil.copytree(planned._folder / name, tmp_path / "given")
    (problem,) = planned.problems(f"data.seq_len=16 model.init_from={source}")
    (code,) = shlex.split(re.findall(r"python -c ('[^']*')", problem)[0])
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    notes = planned.notes(f"data.seq_len=16 model.init_from={tmp_path / made}")
    assert not any("unused_weights" in note for note in notes)
