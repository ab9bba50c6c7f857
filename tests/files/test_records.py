"""The same records out of every kind of file, and files that are damaged."""

from __future__ import annotations

import contextlib
import copy
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
from harness.data.corpus import find_corpus
from harness.errors import ConfigError
from harness.files.chat import Chat
from harness.files.data_format import BadLines
from harness.files.file_kinds import format_of
from harness.files.forms import document_of
from harness.plan.data import glance
from tests.fuzz.values import hostile

TEXTS = [f'line {n}, "quoted"\nand é' + " word" * n for n in range(40)]
RECORDS = [{"text": text, "id": n} for n, text in enumerate(TEXTS)]
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "what is 1 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        ],
    },
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "it is 3"},
]


def lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(records: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, records[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode()


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


def documents(path: Path, **options: Any) -> list[str]:
    texts, text = [], ""
    for piece in find_corpus(str(path), **options).pieces():
        text += piece.text
        if piece.is_last:
            texts.append(text)
            text = ""
    return texts


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_holds_the_same_documents(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(WRITERS[name](RECORDS))
    assert documents(path) == TEXTS
    renamed = [{"body": record["text"], "id": record["id"]} for record in RECORDS]
    path.write_bytes(WRITERS[name](renamed))
    assert documents(path, columns={"text": "body"}) == TEXTS
    text = glance(DataConfig(path=str(path), columns={"text": "body"}))
    assert text.endswith("""the first begins 'line 0, "quoted"'""")
    if "csv" not in name and "tsv" not in name:  # where lines are counted, not rows
        assert ": 40 documents" in text
    # A rehearsal reads the first part, under the same name.
    excerpt = tmp_path / "excerpt" / name
    excerpt.parent.mkdir()
    excerpt.write_bytes(format_of(path, None).excerpt(path, 700))
    first = documents(excerpt, columns={"text": "body"})
    assert first == TEXTS[: len(first)]
    assert 0 < len(first) < 40


@pytest.mark.parametrize("block", [1, 10, 1000])
def test_an_array_is_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("harness.files.formats.json_lines._BLOCK_CHARS", block)
    path = tmp_path / "a.json"
    path.write_text(" \n" + json.dumps(RECORDS, indent=2) + "\n")
    assert documents(path) == TEXTS


def test_a_folder_of_datasets_is_its_files_in_order(tmp_path: Path) -> None:
    """As save_to_disk writes it: shards, their order in state.json, and nothing else is read."""
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
    with pytest.raises(ConfigError, match=r"holds the splits train, test: name one, as in .*train"):
        find_corpus(str(splits))
    (splits / "train" / names[3]).unlink()
    with pytest.raises(ConfigError, match=r"names data-00003-of-00011.arrow, which is no file"):
        find_corpus(str(splits / "train"))


def test_a_hub_id_is_refused_with_the_command_that_fetches_it() -> None:
    with pytest.raises(ConfigError, match=r"hf download HuggingFaceH4/ultrachat_200k --repo-type"):
        find_corpus("HuggingFaceH4/ultrachat_200k")
    with pytest.raises(ConfigError) as caught:
        find_corpus("my/own/folder")
    assert "hf download" not in str(caught.value)


def parts(path: Path, **options: Any) -> list[Any]:
    bad_lines = BadLines()
    corpus = find_corpus(str(path), **options)
    documents = [part.document for part in corpus.parts(bad_lines)]
    bad_lines.require_none()
    return documents


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
    for record in (openai, sharegpt):
        path = tmp_path / name
        path.write_bytes(WRITERS[name]([record]))
        assert parts(path) == [Chat(TURNS, tools)]
    path.write_bytes(WRITERS[name]([{"talk": TURNS[:2] + TURNS[4:]}]))
    assert parts(path, columns={"messages": "talk"}) == [Chat(TURNS[:2] + TURNS[4:])]
    text = glance(DataConfig(path=str(path), columns={"messages": "talk"}))
    assert "1 conversations of 3.0 turns, 32% of their text the assistant's" in text
    assert text.endswith("the first asks 'what is 1 + 2?'")


@pytest.mark.parametrize(
    ("record", "columns", "question"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3", "id": 1}, {}, "Add.\n\n1 2"),
        ({"instruction": "Add.", "input": "", "output": "3"}, {}, "Add."),
        ({"question": "1 + 2?", "answer": "3"}, {}, "1 + 2?"),
        ({"q": "1 + 2?", "a": "3", "text": "x"}, {"question": "q", "answer": "a"}, "1 + 2?"),
    ],
)
def test_questions_are_chats_of_one_turn(
    tmp_path: Path, record: dict[str, Any], columns: dict[str, str], question: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([record]))
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "3"}]
    assert parts(tmp_path / "a.jsonl", columns=columns) == [Chat(turns)]


def test_prompts_are_read_as_they_are_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"question": "1+2=", "answer": "3"}]))
    columns = {"prompt": "question", "completion": "answer"}
    prompt, completion = parts(tmp_path / "a.jsonl", columns=columns)
    assert (prompt.text, prompt.is_learned) == ("1+2=", False)
    assert (completion.text, completion.is_learned) == ("3", True)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"txt": "a"}, "data.columns names txt, which is none of text, prompt, completion"),
        ({"prompt": "a"}, "must name text, or prompt and completion, or .*; it names prompt"),
    ],
)
def test_columns_that_make_no_document_are_refused(columns: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(columns=columns)


def test_columns_that_could_be_two_documents_are_to_be_named(tmp_path: Path) -> None:
    record = {"instruction": "a", "output": "b", "text": "a b"}
    (tmp_path / "a.jsonl").write_bytes(lines([record]))
    with pytest.raises(ConfigError) as caught:
        parts(tmp_path / "a.jsonl")
    assert 'data.columns={instruction="instruction", output="output"}' in str(caught.value)
    assert len(parts(tmp_path / "a.jsonl", columns={"text": "text"})) == 1
    with pytest.raises(ConfigError, match=r"lacks body \(data.columns\); it has instruction, out"):
        parts(tmp_path / "a.jsonl", columns={"text": "body"})


def cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", cut(gzip.compress(lines(RECORDS))), "it is damaged or truncated: Comp"),
        ("a.jsonl.zst", cut(WRITERS["a.jsonl.zst"](RECORDS)), "Truncated"),
        ("a.json", cut(json.dumps(RECORDS).encode()), "it is no whole JSON array: "),
        ("a.parquet", cut(as_parquet(RECORDS)), "it is damaged or truncated after row 0: Parquet"),
        ("a.arrow", cut(as_arrow(RECORDS)), "it is damaged or truncated after row "),
        ("a.csv", b'text,id\n"open,1\n', "a.csv:2: is no CSV: unexpected end of data"),
        ("a.csv", b"text,id\na,1\nb\nc,3\n", "a.csv:3: has 1 columns, where the first row names 2"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        parts(tmp_path / name)
    (problem,) = caught.value.problems
    assert message in problem
    assert str(tmp_path / name) in problem
    assert " documents, " in glance(DataConfig(path=str(tmp_path / name)))  # which is no check


def test_without_pyarrow_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.files.compressed.find_spec", lambda name: None)
    for name in ("a.parquet", "a.arrow", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ConfigError, match='not installed: pip install "pyarrow>=17"'):
            find_corpus(str(tmp_path / name))


def test_hostile_records_are_problems_and_nothing_else() -> None:
    """As many mutations of chats as there is time for: each a document, or a ValueError."""
    draw = random.Random(0)
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    for _ in range(3000):
        record: Any = copy.deepcopy(
            draw.choice(
                [
                    {"messages": TURNS, "tools": [{"name": "add"}]},
                    {"conversations": shared, "system": "s", "tools": "[]"},
                    {"instruction": "a", "input": "b", "output": "c"},
                    {"prompt": "a", "completion": "b"},
                ]
            )
        )
        place = record
        while True:  # to a random place in it
            key = draw.choice([*place] if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.2:
                break
            place = place[key]
        place[key] = hostile(draw)
        with contextlib.suppress(ValueError):
            document = document_of(record, {})
            if isinstance(document, Chat):
                assert all(isinstance(turn["content"], str) for turn in document.messages)
                assert document.num_learned <= document.num_characters
            else:
                assert all(isinstance(piece.text, str) for piece in document)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst", "a.csv"])
def test_spoilt_files_are_problems_and_nothing_else(tmp_path: Path, name: str) -> None:
    draw, content = random.Random(0), WRITERS[name](RECORDS)
    path = tmp_path / name
    problems = 0
    for _ in range(60):
        spoilt = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        path.write_bytes(bytes(spoilt[: draw.choice([None, draw.randrange(1, len(spoilt))])]))
        glance(DataConfig(path=str(path)))
        try:
            documents(path)
        except ConfigError:
            problems += 1
    assert problems > 10
