"""Data sets of other trainers are named, and the command that converts them is tried."""

import io
import json
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.files.corpus import find_corpus
from harness.files.corpus_files import find_files
from tests.files.test_corpus_files import refused
from tests.tables import beside

IDS = np.arange(70_000, dtype=np.uint16)


def webdataset(folder: Path) -> None:
    for shard in range(2):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as archive:
            for name, text in (("0.json", b"{}"), ("0.txt", b"one"), ("1.txt", b"two")):
                member = tarfile.TarInfo(f"{shard}{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))


def nano_gpt(folder: Path) -> None:
    IDS.tofile(folder / "train.bin")


def llm_c(folder: Path) -> None:
    head = struct.pack("<256i", 20240520, 1, len(IDS), *[0] * 253)
    (folder / "train.bin").write_bytes(head + IDS.tobytes())


def nanoset(folder: Path) -> None:
    IDS.astype(np.uint32).tofile(folder / "0.ds")
    (folder / "0.ds.metadata").write_text("gpt2|4\n70000")


def array(folder: Path) -> None:
    np.save(folder / "train.npy", IDS)


@pytest.mark.parametrize("write", [webdataset, nano_gpt, llm_c, nanoset, array])
def test_the_command_of_the_message_converts(write: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "it's data"
    folder.mkdir()
    write(folder)
    (problem,) = refused(folder)
    assert problem.startswith(f"data.path: {folder} holds ")
    command = problem.partition(": run ")[2].partition(", and set data.path=NEW.jsonl")[0]
    command = command.replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "NEW.jsonl").read_text().splitlines()]
    if write is webdataset:
        assert [row["text"] for row in rows] == ["one", "two"] * 2
    else:
        assert np.concatenate([row["input_ids"] for row in rows]).tolist() == IDS.tolist()
    assert find_corpus(str(tmp_path / "NEW.jsonl")).first_document


INDEXES = beside(__file__, "foreign.toml")["indexes"]


@pytest.mark.parametrize("code", INDEXES)
def test_the_index_of_another_library_is_recognised(code: str, tmp_path: Path) -> None:
    """The commands were tried with mosaicml-streaming 0.13 and litdata 0.2.76."""
    (tmp_path / "index.json").write_text(json.dumps(INDEXES[code]))
    (tmp_path / "chunk-0-0.bin").write_bytes(bytes(8))
    for path in (tmp_path, tmp_path / "index.json"):
        assert code in refused(path)[0]


def test_a_pattern_is_answered_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(ConfigError, match=f"name the folder, data.path={tmp_path}$"):
        find_files(f"{tmp_path}/*.jsonl")
    assert find_files(str(tmp_path)).files == (tmp_path / "a.jsonl",)


def test_a_stray_bin_beside_texts_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    IDS.tofile(tmp_path / "other.bin")
    assert find_files(str(tmp_path)).left_out == "1 .bin"


def test_an_array_beside_a_pair_is_one_thing_too_many(tmp_path: Path) -> None:
    for name in ("a.bin", "a.idx"):
        (tmp_path / name).write_bytes(b"1")
    np.save(tmp_path / "ids.npy", IDS)
    with pytest.raises(ConfigError, match="pairs and ids"):
        find_files(str(tmp_path))


def test_the_index_of_an_archive_is_no_pair(tmp_path: Path) -> None:
    webdataset(tmp_path)
    (tmp_path / "a.idx").write_text("v1.2 3\n")
    with pytest.raises(ConfigError, match="as webdataset writes"):
        find_files(str(tmp_path))
