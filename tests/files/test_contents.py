"""Every format in tables: a name and content give documents, or a sentence that rejects them."""

import contextlib
import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from harness.config.data_section import DataConfig
from harness.errors import ConfigError, Unusable
from harness.files.chat import Chat
from harness.files.corpus import find_corpus
from harness.files.corpus_files import find_files
from harness.files.data_format import MAX_PROBLEMS, BadLines
from harness.files.file_kinds import format_of, kind_of
from harness.files.table import Table
from tests.data.glancing import glance
from tests.tables import beside

TEXTS = [f'line {n}, "quoted"\nand é' + " word" * n for n in range(40)]
RECORDS = [{"text": text, "id": n} for n, text in enumerate(TEXTS)]
LINES = '{"text": "one line"}\n{"text": "another"}\n'
TABLES = beside(__file__, "contents.toml")
TURNS = TABLES["turns"]


def lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(records: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, records[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode() + b"\r\n"  # an empty line is no row


def as_parquet(records: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(records), sink, row_group_size=7)
    return bytes(sink.getvalue())


def as_arrow(records: list[dict[str, Any]]) -> bytes:
    sink, columns = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(records)
    with pyarrow.ipc.new_stream(sink, columns.schema) as writer:
        writer.write_table(columns, max_chunksize=7)
    return bytes(sink.getvalue())


WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.jsonl": lines,
    "a.json": lambda records: json.dumps(records, indent=1).encode(),
    "b.json": lines,
    "a.jsonl.gz": lambda records: gzip.compress(lines(records)),
    "a.json.gz": lambda records: gzip.compress(json.dumps(records).encode()),
    "a.jsonl.zst": lambda records: bytes(pyarrow.Codec("zstd").compress(lines(records))),
    "a.csv": table,
    "a.tsv": lambda records: table(records, "\t"),
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
}


def documents(path: Path | None, **options: Any) -> list[Any]:
    """Return the documents: texts (a prompt joined with its completion) and conversations."""
    found, text, bad_lines = [], "", BadLines()
    for part in find_corpus(path and str(path), **options).parts(bad_lines):
        if isinstance(part.document, Chat):
            found.append(part.document)
            continue
        text += part.document.text
        if part.document.is_last:
            found.append(text)
            text = ""
    assert not text
    bad_lines.require_none()
    return found


def problems(path: Path, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        documents(path, **options)
    return caught.value.problems


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_holds_the_same_documents(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(WRITERS[name](RECORDS))
    assert documents(path) == TEXTS
    renamed = [{"body": record["text"], "id": record["id"]} for record in RECORDS]
    path.write_bytes(WRITERS[name](renamed))
    assert documents(path, columns={"text": "body"}) == TEXTS
    text = glance(DataConfig(path=str(path), columns={"text": "body"})).text
    assert text.endswith(
        """the first begins 'line 0, "quoted"'; left out of 40 rows: columns id (40)"""
    )
    if "csv" not in name and "tsv" not in name:  # their errors count lines, not rows
        assert ": 40 documents" in text


@pytest.mark.parametrize("block", [1, 10, 1000])
def test_array_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("harness.files.formats.json_lines._BLOCK_CHARS", block)
    path = tmp_path / "a.json"
    path.write_text(" \n" + json.dumps(RECORDS, indent=2) + "\n" * 40)
    assert documents(path) == TEXTS


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(Unusable, match="a key of it"):
        Table({1: 2}, "file").as_json()


READ: list[tuple[str, bytes | str, dict[str, Any], list[Any]]] = [
    *TABLES["read"]["texts"],
    *(
        (name, content, options, [Chat(turns)])
        for name, content, options, turns in TABLES["read"]["chats"]
    ),
    *(
        (name, f"\n{LINES}", {}, ["one line", "another"])
        for name in ("a.jsonl", "a.JSONL", "a.ndjson", "a.json", "A.Json")
    ),
    *(
        (name, "é or prose.\n" * 400, {}, ["é or prose.\n" * 400])
        for name in ("a.txt", "a.MD", "a.py", "enwik8", "Makefile", "wiki.train.raw")
    ),
    # The user's format overrides the suffix.
    ("a.jsonlines", LINES, {"format": "jsonl"}, ["one line", "another"]),
    ("a.jsonlines", LINES, {"format": "text"}, [LINES]),
    ("part-0", as_parquet([{"text": "one"}]), {"format": "parquet"}, ["one"]),
    ("a.pq", as_arrow([{"text": "one"}]), {"format": "arrow"}, ["one"]),
]


@pytest.mark.parametrize(("name", "content", "options", "expected"), READ)
def test_a_content_is_its_documents(
    tmp_path: Path, name: str, content: bytes | str, options: Any, expected: list[Any]
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert documents(path, **options) == expected
    text = glance(DataConfig(path=str(path), **options)).text
    assert f": {len(expected)} documents" in text
    assert ("the first 1 conversations" in text) == isinstance(expected[0], Chat)
    if not options:
        assert kind_of(path, None) == ("documents", "")
    if expected == ["1+2=3"]:
        (piece,) = [part.document for part in find_corpus(str(path), **options).parts(BadLines())]
        assert (piece.text, piece.learned, piece.is_last) == ("1+2=3", ((4, 5),), True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_conversations_come_in_two_shapes(tmp_path: Path, name: str) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    openai = {"messages": TURNS, "tools": json.dumps(tools)}
    call = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
    shared = [
        {"from": "human", "value": "what is 1 + 2?"},
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "it is 3"},
    ]
    sharegpt = {"conversations": shared, "system": "s", "tools": json.dumps(tools)}
    path = tmp_path / name
    for record in (openai, sharegpt):
        path.write_bytes(WRITERS[name]([record]))
        assert documents(path) == [Chat(TURNS, tools)]
    # Nulls that only make keys equal are left out; one that the schema requires or allows stays.
    given = {"f": {"a": 1, "to": None, "b": 2}, "g": {"a": None, "to": "x", "b": None}}
    calls = [{"function": {"name": name, "arguments": given[name]}} for name in given]
    properties: Any = {"a": {"type": "n"}, "b": {"type": ["n", "null"]}}
    schema = {"name": "g", "parameters": {"properties": properties, "required": ["a"]}}
    rows = [{"messages": [*TURNS[:2], {**TURNS[2], "tool_calls": calls}], "tools": [schema]}]
    path.write_bytes(WRITERS[name](rows))
    called = documents(path)[0].messages[2]["tool_calls"]
    assert [call["function"]["arguments"] for call in called] == [{"a": 1, "b": 2}, given["g"]]
    path.write_bytes(WRITERS[name]([{"talk": TURNS[:2] + TURNS[4:]}] * 2))
    assert documents(path, columns={"messages": "talk"}) == [Chat(TURNS[:2] + TURNS[4:])] * 2
    text = glance(DataConfig(path=str(path), columns={"messages": "talk"})).text
    assert "2 conversations of 3.0 turns, 32% of their text the assistant's" in text
    assert text.endswith("the first asks 'what is 1 + 2?'")


ONE_AND_TWO = [{"text": "a, b; c|d", "n": "1"}, {"text": "line\nbreak", "n": "2"}]


@pytest.mark.parametrize(
    ("content", "separator"),
    [
        (table(ONE_AND_TWO, ";"), "semicolons"),
        (table(ONE_AND_TWO, "\t"), "tabs"),
        (table(ONE_AND_TWO, "|"), "bars"),
        (table(ONE_AND_TWO), ""),
        (table([*ONE_AND_TWO] * 30, ";") + b"short\n", "semicolons"),  # affects no other row
        (b"\xef\xbb\xbfsep=;\r\n" + table(ONE_AND_TWO, ";"), "semicolons"),
        (b"sep=^\n" + table(ONE_AND_TWO, "^"), "'^'"),
        (b'text,n\n"a, b; c|d",1\n"line\nbreak",2\n', ""),
        (b"text;n,x\na;1,5\nb;2,5\n", ""),  # two columns either way: the usual one
        (b"n;text, long\n1;Hello\n", "semicolons"),  # the few rows of a short table decide
        (b"n;text, long\n1;a, b\n2;c\n", "semicolons"),
    ],
)
def test_first_row_tells_a_tables_separator(tmp_path: Path, content: bytes, separator: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    bad_lines, format = BadLines(), format_of(path, None)
    rows = [*format.records(path, bad_lines)]
    is_two = b";n," not in content and b"long" not in content
    if is_two:
        assert [record for _, record in rows[:2]] == ONE_AND_TWO
        assert rows[0][0] == 2 + content.count(b"sep=")
    assert len(bad_lines.problems()) == content.count(b"short")
    note = f"columns separated by {separator}" if separator else ""
    assert format.note(path) == note
    if not bad_lines.by_problem and is_two:
        text = glance(DataConfig(path=str(path), columns={"text": "text"})).text
        assert text.endswith(f"; {note}" if note else "")


def cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n"
LFS_NAMES = ("jsonl", "json", "csv", "parquet", "arrow", "jsonl.gz", "txt", "zip", "png")
ZIPPED = gzip.compress(LINES.encode(), mtime=0)


UNREAD = b'[{"text": "a" "b"}, ' + b" " * (1 << 17) + b"\xff"
Refusal = tuple[str, bytes, str]


def refusals(key: str) -> list[Refusal]:
    rows = TABLES["refused"][key]
    return [(name, content.encode("latin-1"), message) for name, content, message in rows]


# Rejected when the files are located: not text, with advice.
FOUND: list[Refusal] = [
    *refusals("found"),
    *((f"a.{name}", POINTER, "is a git-lfs pointer; run `git lfs pull`") for name in LFS_NAMES),
    *((name, ZIPPED, "is compressed: gunzip -k FILE") for name in ("a", "a.txt.gz")),
]
# Their first lines tell.
FIRST: list[Refusal] = [
    *refusals("first"),
    ("a.txt", "Über é".encode("utf-16"), "it is UTF-16: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    ("a.txt", ZIPPED, "it is compressed: gunzip -k FILE"),
]
# Rejected when they are read.
READING: list[Refusal] = [
    *refusals("reading"),
    ("a.jsonl", LINES.encode("utf-16"), "it is UTF-16: iconv"),
    ("a.jsonl", ZIPPED, "it is compressed: gunzip -k FILE"),
    ("a.jsonl.gz", cut(gzip.compress(lines(RECORDS))), "it is damaged or truncated: Comp"),
    ("a.jsonl.zst", cut(WRITERS["a.jsonl.zst"](RECORDS)), "Truncated"),
    ("a.json", cut(json.dumps(RECORDS).encode()), "it is not one complete JSON array: "),
    # The rest of the file is not read.
    ("a.json", UNREAD, "array: Expecting ',' delimiter in element 1"),
    ("a.parquet", cut(as_parquet(RECORDS)), "it is damaged or truncated after row 0: Parquet"),
    ("a.arrow", cut(as_arrow(RECORDS)), "it is damaged or truncated after row "),
    *(
        (name, write([RECORDS[0], {"text": None}]), f"{name}:2: text must be a string, not NoneTy")
        for name, write in (("a.parquet", as_parquet), ("a.arrow", as_arrow))
    ),
    ("a.csv", "text,id\na,1\n".encode("utf-16"), "it is UTF-16: iconv"),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000, "a.jsonl:1: is JSON that is nested too deeply"),
]


@pytest.mark.parametrize(("name", "content", "message"), [*FOUND, *FIRST, *READING])
def test_bad_content_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (problem,) = problems(path)
    assert message in problem
    assert str(path) in problem
    row = (name, content, message)
    if row in FOUND:
        with pytest.raises(ConfigError, match=f"^data.path: {path} "):
            find_files(str(path))
    elif row in FIRST or not name.endswith(".txt"):  # a dry run reads first records, not texts
        with pytest.raises(ConfigError) as caught:
            glance(DataConfig(path=str(path)))
        assert message in caught.value.problems[0]


BAD_LINES = {line.encode("latin-1"): part for line, part in TABLES["refused"]["lines"]}


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "good"}', *BAD_LINES, b"", b'{"text": "too"}']))
    messages = problems(path)
    numbers = range(2, 2 + len(BAD_LINES))
    assert [text.split(": ")[1] for text in messages] == [f"{path}:{n}" for n in numbers]
    assert all(part in text for text, part in zip(messages, BAD_LINES.values(), strict=True))


def test_a_thousand_bad_lines_make_a_short_report(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl(*range(2000), {"content": "x", "n": 1})
    (first, second) = problems(path)
    counts = '{"text": "..."} (2,000 of 2,001 lines read; this is the first)'
    assert first == f"data.path: {path}:1: must be an object, not int: write it as {counts}"
    assert second.startswith(f"data.path: {path}:2001: needs either text, or prompt and completion")
    path = write_jsonl({"text": "fine"}, {"content": "x", "n": 1}, {"n": 2, "content": "y"})
    (first, second) = problems(path)
    assert first.endswith("'content', 'n': data.columns.text=content names the text")
    assert second.startswith(f"data.path: {path}:3: needs either text, or prompt and completion")
    many = write_jsonl(*({f"key {chr(97 + number) * 2}": "x"} for number in range(26)))
    assert len(problems(many)) == MAX_PROBLEMS


def test_columns_are_to_be_named_and_there(tmp_path: Path) -> None:
    record = {"instruction": "a", "output": "b", "text": "a b"}
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([record]))
    assert 'data.columns={instruction="instruction", output="output"}' in problems(path)[0]
    assert len(documents(path, columns={"text": "text"})) == 1
    (problem,) = problems(path, columns={"text": "body"})
    assert "lacks body (data.columns); it has instruction, out" in problem
    for columns, message in (
        ({"txt": "a"}, "data.columns names txt, which is not one of text, prompt, completion"),
        ({"prompt": "a"}, "must name text, or prompt and completion, or .*; it names prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(columns=columns)


def test_where_reads_matching_records(write_jsonl: Callable[..., Path], tmp_path: Path) -> None:
    path = write_jsonl(*({"text": f"t{n}", "language": n % 2, "kind": "a"} for n in range(4)))
    where = {"language": "1", "kind": "a"}
    assert documents(path, where=where) == ["t1", "t3"]
    assert "left out" not in glance(DataConfig(path=str(path), where=where)).text
    assert find_corpus(str(path), where=where).identity() != find_corpus(str(path)).identity()
    path = write_jsonl({"text": "a", "language": "de"}, {"text": "b"})
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: has no 'language'.*it has 'text'"):
        documents(path, where={"language": "de"})
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"a\.txt: has no columns, but data\.where is"):
        documents(tmp_path / "a.txt", where={"language": "de"})
    with pytest.raises(ConfigError, match="has no columns"):
        find_corpus(None, where={"language": "de"})


def test_missing_pyarrow_names_its_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.files.arrow_rows.find_spec", lambda name: None)
    for name in ("a.parquet", "a.arrow", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ConfigError, match='not installed: pip install "pyarrow>=17"'):
            find_corpus(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst", "a.csv"])
def test_spoilt_files_are_problems_and_nothing_else(tmp_path: Path, name: str) -> None:
    draw, content = random.Random(0), WRITERS[name](RECORDS)
    path = tmp_path / name
    refused = 0
    for _ in range(60):
        spoilt = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        path.write_bytes(bytes(spoilt[: draw.choice([None, draw.randrange(1, len(spoilt))])]))
        with contextlib.suppress(ConfigError):
            glance(DataConfig(path=str(path)))
        try:
            documents(path)
        except ConfigError:
            refused += 1
    assert refused > 10
