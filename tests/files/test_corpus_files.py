"""The files of a path: folders, pairs, the standard library, and what is rejected."""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from argparse import ArgumentTypeError
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from harness.config.data_section import DataConfig
from harness.data.pair import write_indexed
from harness.errors import ConfigError
from harness.files import pieces as pieces_module
from harness.files.corpus import find_corpus
from harness.files.corpus_files import find_files
from harness.files.data_format import BadLines
from harness.files.folder_lock import make_folder, remove_left_over
from harness.files.paths import expanded_path, option_path, user_path
from tests.data.glancing import glance
from tests.files.test_contents import LINES, RECORDS, TEXTS, as_arrow, documents
from tests.real_runs import REPOSITORY
from tests.tables import beside


def refused(path: Path | str, **options: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        find_files(str(path), **options)
    return caught.value.problems


def test_standard_library_corpus_is_of_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages installed beside it are not searched."""
    entered = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: entered.append(str(path)) or scandir(path))
    corpus = find_corpus(None)
    assert any(path.endswith("/json") for path in entered)
    assert not [path for path in entered if "site-packages" in path]
    texts = documents(None)
    assert texts == documents(None)
    assert 8 < sum(len(text.encode()) for text in texts) / 2**20 < 20
    assert any(text.startswith('The "assert" statement') for text in texts)
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {part for file in corpus.files for part in file.relative_to(root).parts}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    number = corpus.files.index(root / "argparse.py")
    assert corpus.name_of(number) == str(root / "argparse.py")
    assert texts[number] == (root / "argparse.py").read_text()


def test_standard_library_identity_follows_its_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = find_corpus(str(path)).identity()
    assert json.dumps(before) == json.dumps(find_corpus(str(path)).identity())
    path.write_text("two")
    os.utime(path, (1, 1))  # the size is the same
    assert find_corpus(str(path)).identity() != before
    corpus = find_corpus(str(path))
    path.unlink()
    with pytest.raises(ConfigError, match=f"^data.path: cannot read {path}: .*No such file"):
        list(corpus.pieces())


@pytest.mark.parametrize("separator", ["\n", "a word", " ", "x"])
def test_a_long_file_is_read_in_pieces(tmp_path, monkeypatch, separator: str) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_CHARS", 100)
    text = separator.join(f"{n} é" for n in range(500))
    path = tmp_path / "long.txt"
    path.write_text(text, newline="")
    pieces = list(find_corpus(str(path)).pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text) for piece in pieces) <= 200
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    if separator == "a word":
        assert all(piece.text.startswith(" word") for piece in pieces[1:])


@pytest.mark.parametrize("keys", [("text",), ("prompt", "completion")])
@pytest.mark.parametrize("separator", ["a word", "x"])
def test_a_long_line_is_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
    write_jsonl: Callable[..., Path],
    keys: tuple[str, ...],
    separator: str,
) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_CHARS", 100)
    value = {key: separator.join(f"{key} {n} é" for n in range(500)) for key in keys}
    path = write_jsonl(value, value)
    pieces: list[Any] = [part.document for part in find_corpus(str(path)).parts(BadLines())]
    assert max(len(piece.text) for piece in pieces) <= 100
    assert documents(path) == ["".join(value.values())] * 2
    trained_on = [piece.text for piece in find_corpus(str(path)).pieces()]
    assert "".join(trained_on) == "".join(piece.text for piece in pieces)
    # A tokenizer trained on them sees no word that crosses the end of a prompt.
    assert len(value[keys[0]]) in accumulate(map(len, trained_on))
    learned = [piece.text[a:b] for piece in pieces for a, b in piece.learned or []]
    assert "".join(learned) == value.get("completion", "") * 2
    so_far = ""
    for piece in pieces:
        assert piece.before == so_far[-64:]
        so_far = "" if piece.is_last else so_far + piece.text
    if separator == "a word":
        assert all(piece.text.startswith((" word", f"{keys[0]} 0")) for piece in pieces)


def test_folder_corpus_skips_and_counts_files_without_text(tmp_path: Path) -> None:
    for name in ("b.txt", "sub/a.md", "README", ".git/config", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c.NDJSON").write_text(LINES)
    for name in ("x.png", "y.PNG", "sub/z.jpg"):
        (tmp_path / name).write_bytes(b"\x89\0\1")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "elsewhere").symlink_to("/tmp")
    files = find_files(str(tmp_path))
    names = [str(file.relative_to(tmp_path)) for file in files.files]
    assert names == ["b.txt", "c.NDJSON", "sub/a.md"]
    assert files.left_out == (
        "README, 2 .png, 1 .jpg, 1 dot file, 1 dot folder, 1 links to folders, 1 pipes, devices or "
        "broken links"
    )
    assert documents(tmp_path) == ["b.txt", "one line", "another", "sub/a.md"]
    text = glance(DataConfig(path=str(tmp_path))).text
    assert ": 4 documents, " in text
    assert "the first begins 'b.txt'; left out: README, 2 .png" in text


def test_a_folder_with_data_that_would_not_be_read_is_refused(tmp_path: Path) -> None:
    """Like a snapshot from the hub in which README is the only text."""
    (tmp_path / "README.md").write_text("About.")
    for name in ("a.xlsx", "b.xlsx", "c.foo"):
        (tmp_path / name).write_text("x")
    table, unknown = refused(tmp_path)
    assert "holds a.xlsx and 1 more of its kind, which is a table" in table
    assert "holds c.foo, which has the unknown suffix .foo: data.format=text" in unknown
    assert len(find_files(str(tmp_path), "text").files) == 4


def test_folder_of_token_pairs_is_one_corpus_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.1", "a", "sub/c"):
        write_indexed(tmp_path / name, 8192, [([1, 2, 3], True), ([4], True)])
    (tmp_path / "a.made-from.json").write_text("{}")  # written by tokenize_data.py
    files = find_files(str(tmp_path))
    assert files.kind == "indexed"
    assert files.pairs == tuple(tmp_path / name for name in ("a", "b.1", "sub/c"))
    text = glance(DataConfig(path=str(tmp_path))).text
    assert text.startswith(f"6 documents, 12 tokens in 3 pairs of {tmp_path}: a 2 documents, 4 tok")
    assert "; sub/c 2 documents, 4 tokens" in text


def test_a_folder_of_pairs_holds_nothing_else(tmp_path: Path) -> None:
    for name in ("a.bin", "a.idx", "b.bin", "b.idx", "c.bin", "d.idx", "notes.txt", "x.npy"):
        (tmp_path / name).write_bytes(b"\0")
    (tmp_path / "a.masks.npy").write_bytes(b"\0")
    (problem, other, masks, rest) = refused(tmp_path)
    assert f"{tmp_path}/c.bin has no .idx beside it" in problem
    assert f"{tmp_path}/d.idx has no .bin beside it" in other
    assert "holds a.masks.npy, which masks tokens of its pair" in masks
    assert "2 .bin/.idx pairs and notes.txt and 1 more" in rest
    assert f"or name a pair, as in data.path={tmp_path}/a" in rest


def test_a_path_without_text_says_so(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "gone.txt")[0]
    assert "empty: 0 files, 0 bytes" in refused(tmp_path)[0]
    (tmp_path / "x.png").write_bytes(b"\x89\0\1")
    assert "is empty: 0 files, 0 bytes, and 1 .png that cannot be" in refused(tmp_path)[0]


def test_pipes_devices_and_sockets_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path / "socket", "/dev/zero"):
            assert "is a device, pipe or socket" in refused(path)[0]
    (tmp_path / "a.txt").write_text("x")
    assert find_files(str(tmp_path)).left_out == "2 pipes, devices or broken links"


def test_token_pair_is_named_by_prefix_or_file(tmp_path: Path) -> None:
    pair = tmp_path / "my.pair"
    write_indexed(pair, 8192, [([1, 2, 3], True), ([4], False), ([5], True)])
    for suffix in ("", ".bin", ".idx"):
        corpus = find_corpus(f"{pair}{suffix}")
        assert (corpus.kind, corpus.path) == ("indexed", pair)
    assert glance(DataConfig(path=str(pair))).text == f"2 documents, 5 tokens in {pair}.bin"


def test_large_file_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{LINES}\n" * 1000)
    assert glance(DataConfig(path=str(path))).documents == 2000
    monkeypatch.setattr("harness.data.glance._MOST_BYTES", 100)
    assert ": at least 1,000 documents" in glance(DataConfig(path=str(path))).text


def test_a_folder_of_datasets_is_its_files_in_order(tmp_path: Path) -> None:
    """As written by save_to_disk: shards, their order in state.json, and nothing else is read."""
    folder = tmp_path / "saved"
    folder.mkdir()
    names = [f"data-{n:05}-of-00011.arrow" for n in range(11)]
    for number, name in enumerate(names):
        rows = RECORDS[number * 4 : number * 4 + 4] or RECORDS[:1]
        (folder / name).write_bytes(as_arrow(rows))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    state = {"_data_files": [{"filename": name} for name in names[:10][::-1]], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    expected = [text for first in range(36, -1, -4) for text in TEXTS[first : first + 4]]
    assert documents(folder) == expected
    splits = tmp_path / "dict"
    splits.mkdir()
    folder.rename(splits / "train")
    (splits / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert documents(splits) == expected
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match="names test, but there is no such saved data beside it"):
        find_corpus(str(splits))
    shutil.copytree(splits / "train", splits / "test")
    assert find_files(str(splits)).split_text == "split train (not read: test)"
    assert documents(splits) == expected == documents(splits, split="test")
    assert documents(splits, split="all") == expected * 2
    (splits / "train" / names[3]).unlink()
    with pytest.raises(ConfigError, match=r"names data-00003.*, but there is no such file"):
        find_corpus(str(splits / "train"))


def test_a_hub_id_is_refused_with_the_command_that_fetches_it() -> None:
    with pytest.raises(ConfigError, match=r"hf download HuggingFaceH4/ultrachat_200k --repo-type"):
        find_corpus("HuggingFaceH4/ultrachat_200k")
    with pytest.raises(ConfigError) as caught:
        find_corpus("my/own/folder")
    assert "hf download" not in str(caught.value)


def test_misspelt_path_has_a_suggestion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mydata").mkdir()
    for name in ("chats.json", "chats.jsonl", "notes.jsonl"):
        (tmp_path / "mydata" / name).touch()
    monkeypatch.chdir(tmp_path)
    for path in ("mydata/chat.jsonl", "my_data/Chats.jsonl", str(tmp_path / "mydata/chat.jsonl")):
        (problem,) = refused(path)
        assert problem.endswith("mydata/chats.jsonl?"), problem
    for path in ("mydata/words.jsonl", "owner/chat.jsonl", "owner/rows.parquet"):
        (problem,) = refused(path)
        assert "did you mean" not in problem
        assert "hf download" not in problem


def test_a_path_is_expanded_and_a_name_stays(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded_path("~/x") == "/home/me/x"
    assert expanded_path("~") == "/home/me"
    for name in ("tiny", "org/model", "a/~b", "runs/x@5"):
        assert expanded_path(name) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("~nosuchuser/x", "this machine has no home folder for ~nosuchuser$"),
        ("~nosuchuser@5", "no home folder for ~nosuchuser@5"),
        ("a/" + "b" * 256, "255 bytes"),
        ("é" * 128, "255 bytes"),
        ("a/" * 3000, "4,095 bytes"),
        ("a\0b", "NUL character"),
    ],
)
def test_corpus_path_that_no_file_can_have_is_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        expanded_path(text)


@pytest.mark.parametrize("text", ["\udcff", "a" * 256, "a\0b", "~nosuchuser/x"])
def test_a_path_in_an_option_can_be_one(text, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert option_path("~/x") == Path("/home/me/x")
    with pytest.raises(ArgumentTypeError, match=r"UTF-8|255 bytes|NUL|no home"):
        option_path(text)


def test_a_path_of_a_key_is_expanded_or_refused_by_the_key(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("data.cache_dir", "~/x") == Path("/home/me/x")
    with pytest.raises(ConfigError, match=r"data\.cache_dir is '~nosuchuser/x': this machine"):
        user_path("data.cache_dir", "~nosuchuser/x")


# --- folders of a process ---


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    lives = beside(__file__, "corpus_files.toml")["lives"]
    command = [sys.executable, "-c", lives, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes) as process:
        assert process.stdout is not None
        folder = tmp_path / process.stdout.readline().strip()
        (folder / "states.swp").touch()
        own = make_folder(tmp_path, "optimizer")
        remove_left_over(tmp_path, "optimizer")
        assert {*tmp_path.iterdir()} == {folder, own, others}
        process.kill()
    remove_left_over(tmp_path, "optimizer")
    assert {*tmp_path.iterdir()} == {own, others}
    remove_left_over(tmp_path / "none", "optimizer")
