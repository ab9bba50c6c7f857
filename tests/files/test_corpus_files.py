"""Files that a path leads to, and those refused instead of being read as text."""

from __future__ import annotations

import gzip
import os
import socket
from pathlib import Path

import pytest

from harness.config.data_section import DataConfig
from harness.data.indexed import write_indexed
from harness.errors import ConfigError
from harness.files.corpus_files import find_files
from harness.files.file_kinds import format_of, kind_of
from harness.plan.data import glance

LINES = '{"text": "one line"}\n{"text": "another"}\n'


def refused(path: Path | str, **options: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        find_files(str(path), **options)
    return caught.value.problems


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.json", "A.Json"])
def test_lines_of_json_are_documents_whatever_they_are_called(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(f"\n{LINES}")
    assert kind_of(path, None) == ("documents", "")
    assert format_of(path, None).name == "jsonl"
    assert ": 2 documents" in glance(DataConfig(path=str(path)))


@pytest.mark.parametrize("name", ["a.txt", "a.MD", "a.py", "enwik8", "Makefile", "wiki.train.raw"])
def test_text_is_one_document(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("Prose é.\nMore.\n")
    assert find_files(str(path)).files == (path,)
    text = glance(DataConfig(path=str(path)))
    assert ": 1 documents" in text
    assert text.endswith("the first begins 'Prose é.'")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{\n "text": "a"\n}\n', "is JSON, but neither an array nor one object a line"),
        ("a.xlsx", b"PK", "is a table: write a .jsonl, .* pandas.read_excel"),
        ("a.psv", b"text|n\nhello|1\n", "is a table"),
        ("a", b"PAR1....\xff", "is a table in Parquet: data.format=parquet reads it"),
        ("a.txt.gz", gzip.compress(LINES.encode(), mtime=0), "is compressed: gunzip -k FILE"),
        ("a.txt.zst", b"\x28\xb5\x2f\xfd", "is compressed: zstd -d FILE"),
        ("a", gzip.compress(LINES.encode(), mtime=0), "is compressed: gunzip -k FILE"),
        ("a.tar", b"a", "is an archive: unpack it"),
        ("a.npy", b"\x93NUMPY", r"write token ids as a \.bin/\.idx pair"),
        ("a.pdf", b"%PDF-1.4", "extract its text into .txt"),
        ("a.png", b"\x89PNG\r\n\x1a\n\0", "is no UTF-8 text"),
        ("a.jsonlines", LINES.encode(), "unknown suffix .jsonlines: data.format=text reads it"),
    ],
)
def test_what_is_no_text_is_refused_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (problem,) = refused(path)
    assert problem.startswith(f"data.path: {path} ")
    with pytest.raises(ConfigError, match=message):
        find_files(str(path))


def test_the_users_word_goes_before_the_suffix(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonlines"
    path.write_text(LINES)
    assert ": 2 documents" in glance(DataConfig(path=str(path), format="jsonl"))
    assert ": 1 documents" in glance(DataConfig(path=str(path), format="text"))
    path.write_bytes(b"\0\1\2")
    assert "is no UTF-8 text" in refused(path, format="text")[0]


def test_a_folder_is_read_but_for_what_is_no_text_which_is_counted(tmp_path: Path) -> None:
    for name in ("b.txt", "sub/a.md", "README", ".git/config", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c.NDJSON").write_text(LINES)
    for name in ("x.png", "y.PNG", "sub/z.jpg"):
        (tmp_path / name).write_bytes(b"\x89\0\1")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "elsewhere").symlink_to("/tmp")
    files = find_files(str(tmp_path))
    assert [str(file.relative_to(tmp_path)) for file in files.files] == [
        *("README", "b.txt", "c.NDJSON", "sub/a.md"),
    ]
    assert files.left_out == "2 .png, 1 .jpg, 1 links to folders, 1 pipes, devices or broken links"
    text = glance(DataConfig(path=str(tmp_path)))
    assert ": 5 documents, " in text
    assert "the first begins 'README'; left out: 2 .png" in text


def test_a_folder_with_data_that_would_not_be_read_is_refused(tmp_path: Path) -> None:
    """As a snapshot from the hub, whose README is all the text there is."""
    (tmp_path / "README.md").write_text("About.")
    for name in ("a.xlsx", "b.xlsx", "c.foo"):
        (tmp_path / name).write_text("x")
    table, unknown = refused(tmp_path)
    assert "holds a.xlsx and 1 more of its kind, which is a table" in table
    assert "holds c.foo, which has the unknown suffix .foo: data.format=text" in unknown
    assert len(find_files(str(tmp_path), "text").files) == 4


def test_a_folder_of_pairs_is_one_corpus_in_the_order_of_the_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.1", "a", "sub/c"):
        write_indexed(tmp_path / name, 8192, [([1, 2, 3], True), ([4], True)])
    (tmp_path / "a.made-from.json").write_text("{}")  # tokenize_data.py writes it
    files = find_files(str(tmp_path))
    assert files.kind == "indexed"
    assert files.pairs == tuple(tmp_path / name for name in ("a", "b.1", "sub/c"))
    text = glance(DataConfig(path=str(tmp_path)))
    assert text.startswith(f"6 documents, 12 tokens in 3 pairs of {tmp_path}: a 2 documents, 4 tok")
    assert "; sub/c 2 documents, 4 tokens" in text


def test_a_folder_of_pairs_holds_nothing_else(tmp_path: Path) -> None:
    for name in ("a.bin", "a.idx", "b.bin", "b.idx", "c.bin", "d.idx", "notes.txt", "x.npy"):
        (tmp_path / name).write_bytes(b"\0")
    (tmp_path / "a.masks.npy").write_bytes(b"\0")
    (problem, other, masks, rest) = refused(tmp_path)
    assert f"{tmp_path}/c.bin has no .idx beside it" in problem
    assert f"{tmp_path}/d.idx has no .bin beside it" in other
    assert "holds a.masks.npy, which says what of its pair is not learned" in masks
    assert "2 .bin/.idx pairs and notes.txt and 1 more" in rest
    assert f"or name a pair, as in data.path={tmp_path}/a" in rest


def test_a_folder_without_text_says_what_it_holds(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "~nosuchuser/x",
            "data.path is '~nosuchuser/x': this machine knows no home of ~nosuchuser",
        ),
        ("a\0b", "no path holds a NUL character"),
        ("x" * 300, "the name of a file or folder has 255 bytes at most"),
    ],
)
def test_paths_that_cannot_be(path: str, message: str) -> None:
    assert message in refused(path)[0]


def test_a_pair_is_glanced_at_by_its_header(tmp_path: Path) -> None:
    write_indexed(tmp_path / "pair", 8192, [([1, 2, 3], True), ([4], False), ([5], True)])
    text = glance(DataConfig(path=str(tmp_path / "pair")))
    assert text == f"2 documents, 5 tokens in {tmp_path / 'pair.bin'}"


def test_a_large_file_of_lines_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.plan.data._MOST_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_text(LINES * 100)
    assert ": at least 5 documents" in glance(DataConfig(path=str(path)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Über é".encode("utf-16"), "it is UTF-16: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
        (b"caf\xe9 au lait", "of Latin-1, iconv -f LATIN1"),
        (gzip.compress(b"text", mtime=0), "it is compressed: gunzip -k FILE"),
    ],
)
def test_a_dry_run_sees_what_text_cannot_be_read(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        glance(DataConfig(path=str(tmp_path / "a.txt")))
    assert message in caught.value.problems[0]


def test_a_line_that_is_no_document_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"instruction": "x"}\n')
    text = glance(DataConfig(path=str(tmp_path / "a.jsonl")))
    assert "the first cannot be read: needs either text, or prompt and completion, " in text
    assert text.endswith("it has 'instruction'")
