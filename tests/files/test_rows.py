"""Forms of a row: what is read and learned from each, and which columns are not."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from harness.config.assignments import assign_all
from harness.files.chat import Chat
from harness.files.forms import read
from harness.files.notes import Notes
from harness.files.pieces import Ids, Piece
from harness.files.turns import Message
from tests.tables import beside

TABLES = beside(__file__, "rows.toml", with_parts=True)
_PARTS = TABLES["parts"]
Q, A, Q2, A2 = (_PARTS[name] for name in ("question", "answer", "question2", "answer2"))
RESULT, CALLED, TOOL = (_PARTS[name] for name in ("result", "called", "tool"))


def call(arguments: object, name: str = "add") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def asks(*calls: dict[str, Any], content: str = "", **more: Any) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": [*calls], **more}


def messages(*turns: object, **columns: object) -> dict[str, Any]:
    return {"messages": [*turns], **columns}


def chat(turns: list[Message], unlearned: Iterable[int] = (), **more: Any) -> Chat:
    return Chat(turns, unlearned=frozenset(unlearned), **more)


READ: dict[str, tuple[dict[str, Any], Chat]] = {
    **{name: (case.pop("row"), chat(**case)) for name, case in TABLES["read"].items()},
    **{
        f"{key}={value}": (
            messages(Q, {**A, key: value}, Q2, {**A2, key: 1}),
            Chat([Q, A, Q2, A2], unlearned=frozenset({1})),
        )
        for key in ("weight", "train", "trainable", "loss", "training", "train_on_turn", "learn")
        for value in (0, False, 0.0)
    },
    **{
        f"arguments {arguments!r}": (
            messages(Q, asks(call(arguments)), RESULT, A),
            Chat([Q, asks(call({})), RESULT, A]),
        )
        for arguments in (None, "", " ", "null", "{}", {})
    },
    **{
        f"arguments as {key}": (
            messages(Q, asks({"name": "add", **nothing, key: value}), RESULT, A),
            Chat(CALLED),
        )
        for key in ("args", "input", "parameters")
        for nothing, value in (({}, {"a": 1}), ({"arguments": None}, '{"a": 1}'))
    },
    **{
        key: (messages(Q, {**A, key: "hm"}), Chat([Q, {**A, "reasoning_content": "hm"}]))
        for key in ("reasoning_content", "reasoning", "thinking", "thought")
    },
}


@pytest.mark.parametrize("name", READ)
def test_a_row_is_a_conversation(name: str) -> None:
    row, expected = READ[name]
    document, notes = read(row, {})
    assert document == expected
    assert not notes


def pieces(row: dict[str, Any]) -> list[Piece]:
    document = read(row, {})[0]
    assert not isinstance(document, Chat | Ids)
    return [*document]


def test_a_pair_is_one_text_whose_end_is_learned() -> None:
    assert pieces({"prompt": "1+2=", "completion": "3"}) == [Piece("1+2=3", ((4, 5),))]
    assert pieces({"prompt": "", "completion": "3"}) == [Piece("3", ((0, 1),))]
    assert pieces({"prompt": "1", "completion": ""}) == [Piece("1", ())]
    assert pieces({"prompt": "[{1}]", "completion": "3"})[0].text == "[{1}]3"


def test_segments_are_one_text() -> None:
    learned = ((False, "a "), (True, "b"), (True, "c"))
    segments = [{"label": label, "text": text} for label, text in learned]
    assert pieces({"segments": json.dumps(segments)}) == [Piece("a bc", ((2, 3), (3, 4)))]
    open_end = [*segments, {"label": False, "text": " d"}]
    expected = [Piece("a bc d", ((2, 3), (3, 4)), end_is_learned=False)]
    assert pieces({"segments": open_end}) == expected
    # Beside a text they are its transcript or something else.
    document, notes = read({"text": "a", "segments": [{"start": 1}]}, {})
    assert [*document] == [Piece("a")]  # type: ignore[misc]
    assert notes == [("columns", "segments")]


def test_token_ids_are_read_as_they_are() -> None:
    ids = [5, 6, 7, 8]
    assert read({"input_ids": ids}, {})[0] == Ids(ids, [(0, 4)])
    labels = [-100, 6, -100, 8]
    assert read({"input_ids": ids, "labels": labels}, {})[0] == Ids(ids, [(1, 2), (3, 4)])
    padded = {"input_ids": [0, *ids], "labels": [-100, *labels], "attention_mask": [0, 1, 1, 1, 1]}
    assert read(padded, {})[0] == Ids(ids, [(1, 2), (3, 4)])
    for mask in ([0, 1, 0, 1], [False, True, False, True], [0.0, 1.0, 0.0, 1.0]):
        for key in ("loss_mask", "completion_mask", "assistant_masks"):
            assert read({"input_ids": ids, key: mask}, {})[0] == Ids(ids, [(1, 2), (3, 4)])
    both = {"input_ids": ids, "labels": labels, "completion_mask": [0, 0, 1, 1]}
    assert read(both, {})[0] == Ids(ids, [(3, 4)])
    columns = {"input_ids": "tokens"}
    assert read({"tokens": "[5, 6]"}, columns)[0] == Ids([5, 6], [(0, 2)])


def test_unread_row_keys_are_named() -> None:
    row = {
        **messages(Q, {**A, "weight": 1}, {**Q2, "train": True}, A2, chosen="x", tools=[]),
        "rejected": [A],
        "images": [],
        "label": 0,
    }
    document, notes = read(row, {})
    assert document == Chat([Q, A, Q2, A2])
    assert [name for kind, name in notes if kind == "columns"] == ["chosen", "rejected", "label"]
    others = ("turns", "turns of roles other than the assistant that are marked as learned")
    assert notes[-1] == others
    document, notes = read(messages({**Q, "reasoning_content": "hm"}, A), {})
    assert document == Chat([Q, A])
    assert notes == [("turns", "thoughts of roles other than the assistant (not read)")]
    _, notes = read({"prompt": "a", "completion": "b", "system": "s"}, {})
    assert notes == [("columns", "system")]


def nested(value: object, depth: int = 2000) -> object:
    for _ in range(depth):
        value = [{"type": "text", "text": value}]
    return value


def test_notes_are_bounded_and_printable() -> None:
    notes = Notes()
    notes.add([("columns", "\x1b[31m\nred"), ("columns", "plain")] * 2)
    assert notes.text() == "columns '\\x1b[31m\\nred' (2), plain (2)"
    for n in range(2000):
        notes.add(read({"text": "a", f"\U0001f642 {n} {'long ' * 1000}": 1}, {})[1])
    assert len(notes) <= 1003
    assert notes["columns", "others"] == 1002
    written = json.dumps(notes.as_json())
    assert len(written) < 2**20
    assert Notes.from_json(json.loads(written)) == notes


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{name: (case["row"], case["says"]) for name, case in TABLES["refused"].items()},
    **{
        f"a row marked {key}={value!r}": (
            {**row, key: value},
            f"has {key}={value!r}, which marks turns, not rows",
        )
        for key, value in (
            *(("weight", value) for value in (0, "0", 0.0, "0.0")),
            *(("train", value) for value in (False, "False", "false", "FALSE")),
        )
        for row in ({"instruction": "1 + 2?", "output": "3"}, {"prompt": "1", "completion": "2"})
    },
    **{
        f"a bad example by {key}={value!r}": (
            {"prompt": [Q], "completion": [A], key: value},
            f"has {key}={value!r}, which marks an answer not to be learned",
        )
        for key in ("label", "kto_tag")
        for value in (False, "False")
    },
    "deep parts": (messages({**Q, "content": nested("a")}, A), "is nested too deeply"),
    "deep keys": (messages({**Q, "more": nested("a")}, A), "is nested too deeply"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_is_refused_with_what_is_wrong(name: str) -> None:
    row, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        read(row, {})[0]


NAMED = tomllib.loads(Path(__file__).with_name("named_columns.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMED)
def test_columns_of_other_names_are_told_how_to_be_named(name: str) -> None:
    row, advice = NAMED[name]["row"], NAMED[name]["says"]
    with pytest.raises(ValueError, match=re.escape(advice)) as refused:
        read(row, {})[0]
    # After following the advice, it reads the row.
    if columns := re.search(r"'?data\.columns[.=]\S.*?(?=$| learns| names)", str(refused.value)):
        tree: dict[str, Any] = {}
        assert assign_all(tree, shlex.split(columns[0]))[1] == []
        document, _ = read(row, tree["data"]["columns"])
        learned = [*document] if not isinstance(document, Chat | Ids) else document
        assert "4" not in str(learned)


@pytest.mark.parametrize("columns", [{}, {"messages": "messages"}])
def test_named_columns_keep_their_companions(columns: dict[str, str]) -> None:
    row = {"messages": [Q, A], "tools": [TOOL], "system_prompt": "s", "id": 7}
    document, notes = read(row, columns)
    system = {"role": "system", "content": "s"}
    assert document == Chat([system, Q, A], [TOOL])
    assert notes == [("columns", "id")]


def test_named_ids_keep_their_labels() -> None:
    row = {"ids": [5, 6, 7], "labels": [-100, 6, 7]}
    assert read(row, {"input_ids": "ids"})[0] == Ids([5, 6, 7], [(1, 3)])
