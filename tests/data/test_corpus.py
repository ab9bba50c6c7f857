from __future__ import annotations

import gzip
import json
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.data.corpus import Corpus, find_corpus
from harness.errors import ConfigError
from harness.files import pieces as pieces_module
from harness.files.data_format import MAX_PROBLEMS
from harness.files.pieces import Piece


def documents(corpus: Corpus) -> list[str]:
    texts, open_text = [], ""
    for piece in corpus.pieces():
        open_text += piece.text
        if piece.is_last:
            texts.append(open_text)
            open_text = ""
    assert not open_text
    return texts


def problems(corpus: Corpus) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        list(corpus.pieces())
    return caught.value.problems


def test_the_library_is_this_interpreters() -> None:
    corpus = find_corpus(None)
    texts = documents(corpus)
    root = Path(sysconfig.get_paths()["stdlib"])
    assert 8 < sum(len(text.encode()) for text in texts) / 2**20 < 20
    assert (root / "argparse.py").read_text() in texts
    assert any(text.startswith('The "assert" statement') for text in texts)
    assert texts == documents(find_corpus(None))
    parts = {part for file in corpus.files for part in file.relative_to(root).parts}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    number = corpus.files.index(root / "argparse.py")
    assert corpus.name_of(number) == str(root / "argparse.py")
    assert texts[number] == (root / "argparse.py").read_text()


def test_what_is_installed_beside_the_library_is_not_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: entered.append(str(path)) or scandir(path))
    find_corpus(None)
    assert any(path.endswith("/json") for path in entered)
    assert not [path for path in entered if "site-packages" in path]


def test_a_text_file_is_one_document_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\ntwo\rthree\n\n é\t".encode())
    assert documents(find_corpus(str(path))) == ["one\r\ntwo\rthree\n\n é\t"]


def test_a_folder_is_read_in_a_fixed_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", ".git/config", "a/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c.jsonl").write_text('{"text": "1"}\n\n{"text": "2"}')
    corpus = find_corpus(str(tmp_path))
    assert documents(corpus) == ["a/z.md", "a.txt", "b.txt", "1", "2"]


def test_prompts_are_pieces_of_their_own(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"prompt": "2+2=", "completion": "4", "id": 7})
    assert list(find_corpus(str(path)).pieces()) == [
        Piece("2+2=", is_learned=False, is_last=False),
        Piece("4"),
    ]


@pytest.mark.parametrize("separator", ["\n", "a word", " ", "x"])
def test_a_long_file_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
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


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": "no end"',
        b'["text"]',
        b'{"txt": "typo"}',
        b'{"text": 3}',
        b'{"prompt": "p"}',
        b'{"text": "t", "prompt": "p", "completion": "c"}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"",
        b'{"prompt": null, "completion": "c"}',
    ]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(lines))
    messages = problems(find_corpus(str(path)))
    assert [text.split(": ")[1] for text in messages] == [
        f"{path}:{number}" for number in (2, 3, 4, 5, 6, 7, 8, 9, 11)
    ]
    expected = [
        "is no JSON: Expecting ',' delimiter at column 18",
        "object, not list",
        "'txt'",
        "text must be a string, not int",
        "prompt and completion, or instruction and output, ",
        "either",
        "codec can't decode byte 0xff",
        "surrogates not allowed",
        "prompt must be a string, not NoneType",
    ]
    for text, part in zip(messages, expected, strict=True):
        assert part in text


def test_a_thousand_bad_lines_make_a_short_report(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl(*range(2000), {"content": "x", "n": 1})
    (first, second) = problems(find_corpus(str(path)))
    counts = "(2,000 of 2,001 lines read; this is the first)"
    assert first == f"data.path: {path}:1: must be an object, not int {counts}"
    assert second.startswith(f"data.path: {path}:2001: needs either text, or prompt and completion")
    path = write_jsonl({"text": "fine"}, {"content": "x", "n": 1}, {"n": 2, "content": "y"})
    (first, second) = problems(find_corpus(str(path)))
    assert first.endswith("'content', 'n': data.columns.text=content names the text")
    assert second.startswith(f"data.path: {path}:3: needs either text, or prompt and completion")
    many = write_jsonl(*({f"key {chr(97 + number) * 2}": "x"} for number in range(26)))
    assert len(problems(find_corpus(str(many)))) == MAX_PROBLEMS


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    content = '{"text": "é"}' if name == "a.jsonl" else "é"
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert documents(find_corpus(str(tmp_path / name))) == ["é"]


@pytest.mark.parametrize("encoding", ["utf-16", "gzip"])
def test_lines_in_another_encoding_make_one_problem(tmp_path: Path, encoding: str) -> None:
    text = '{"text": "many"}\n' * 100
    content = gzip.compress(text.encode()) if encoding == "gzip" else text.encode(encoding)
    (tmp_path / "a.jsonl").write_bytes(content)
    (problem,) = problems(find_corpus(str(tmp_path / "a.jsonl")))
    advice = {"gzip": "it is compressed: gunzip -k FILE", "utf-16": "it is UTF-16: iconv"}
    assert advice[encoding] in problem


def test_json_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000)
    (problem,) = problems(find_corpus(str(tmp_path / "a.jsonl")))
    assert problem.endswith("a.jsonl:1: is JSON that is nested too deeply")


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
    corpus = find_corpus(str(write_jsonl(value, value)))
    pieces = list(corpus.pieces())
    assert max(len(piece.text) for piece in pieces) <= 100
    assert documents(corpus) == ["".join(value.values())] * 2
    prompt = "".join(piece.text for piece in pieces if not piece.is_learned)
    assert prompt == value.get("prompt", "") * 2
    if separator == "a word":
        starts = {f"{key} 0" for key in keys}
        assert all(piece.text.startswith((" word", *starts)) for piece in pieces)


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.txt"
    path.write_bytes(b"fine\nalso \xe9 fine\n")
    (problem,) = problems(find_corpus(str(path)))
    assert problem.startswith(
        f"data.path: cannot read {path}: 'utf-8' codec can't decode byte 0xe9"
    )


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    corpus = find_corpus(str(tmp_path))
    (tmp_path / "a.txt").unlink()
    (problem,) = problems(corpus)
    assert problem.startswith(f"data.path: cannot read {tmp_path / 'a.txt'}: ")
    assert "No such file" in problem


def test_what_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    def refuse(path: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            find_corpus(str(path))

    refuse(tmp_path / "gone.txt", "does not exist")
    refuse(tmp_path, "empty: 0 files, 0 bytes")
    (tmp_path / "empty.txt").touch()
    refuse(tmp_path / "empty.txt", "is empty")


def test_a_pair_is_found_by_prefix_or_either_name(tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"my.tokens.{suffix}").write_bytes(b"1")
    for name in ("my.tokens", "my.tokens.bin", "my.tokens.idx"):
        corpus = find_corpus(str(tmp_path / name))
        assert corpus.kind == "indexed"
        assert corpus.path == tmp_path / "my.tokens"


def test_its_identity_changes_with_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = find_corpus(str(path)).identity()
    assert json.dumps(before) == json.dumps(find_corpus(str(path)).identity())
    path.write_text("two!")
    assert find_corpus(str(path)).identity() != before


def test_where_reads_the_records_with_the_values(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl(*({"text": f"t{n}", "language": n % 2, "kind": "a"} for n in range(4)))
    corpus = find_corpus(str(path), where={"language": "1", "kind": "a"})
    assert [piece.text for piece in corpus.pieces()] == ["t1", "t3"]
    assert corpus.identity() != find_corpus(str(path)).identity()


def test_where_needs_the_columns(write_jsonl: Callable[..., Path], tmp_path: Path) -> None:
    path = write_jsonl({"text": "a", "language": "de"}, {"text": "b"})
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: has no 'language'.*it has 'text'"):
        list(find_corpus(str(path), where={"language": "de"}).pieces())
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"a\.txt: has no columns, but data\.where is"):
        list(find_corpus(str(tmp_path / "a.txt"), where={"language": "de"}).pieces())
    with pytest.raises(ConfigError, match="has no columns"):
        find_corpus(None, where={"language": "de"})
