"""Forms of a row: what is read and learned from each, and which columns are not."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from harness.config.assignments import assign_all
from harness.files.chat import Chat
from harness.files.forms import read
from harness.files.notes import Notes
from harness.files.pieces import Ids, Piece
from harness.files.turns import Message

Q, A = {"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}
Q2, A2 = {"role": "user", "content": "and 4?"}, {"role": "assistant", "content": "7"}
S = {"role": "system", "content": "Add."}
HUMAN, GPT = {"from": "human", "value": "1 + 2?"}, {"from": "gpt", "value": "3"}
SCHEMA = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}


def call(arguments: object, name: str = "add") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def asks(*calls: dict[str, Any], content: str = "", **more: Any) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": [*calls], **more}


RESULT = {"role": "tool", "content": "3"}
CALLED = [Q, asks(call({"a": 1})), RESULT, A]


def messages(*turns: object, **columns: object) -> dict[str, Any]:
    return {"messages": [*turns], **columns}


READ: dict[str, tuple[dict[str, Any], Chat]] = {
    # Questions with answers and additional columns.
    "alpaca": ({"instruction": "1 + 2?", "output": "3", "system": "Add."}, Chat([S, Q, A])),
    "alpaca's history": (
        {"instruction": "and 4?", "input": "", "output": "7", "history": [["1 + 2?", "3"]]},
        Chat([Q, A, Q2, A2])),
    "history as text": (
        {"query": "and 4?", "response": "7", "history": json.dumps([["1 + 2?", "3"]])},
        Chat([Q, A, Q2, A2])),
    "history of turns": ({"question": "and 4?", "answer": "7", "history": [Q, A], "system": "Add."},
        Chat([S, Q, A, Q2, A2])),
    "an empty history": ({"query": "1 + 2?", "response": "3", "history": []}, Chat([Q, A])),
    # Turns in other forms.
    "turns as text": ({"messages": json.dumps([Q, A])}, Chat([Q, A])),
    "each turn as text": (messages(json.dumps(Q), json.dumps(A)), Chat([Q, A])),
    "an object of arrays": ({"conversations": {"from": ["human", "gpt"], "value": ["1 + 2?", "3"]}},
        Chat([Q, A])),
    "keys of the other form": (
        {"conversations": [{"role": "user", "value": "1 + 2?"}, {"from": "gpt", "content": "3"}]},
        Chat([Q, A])),
    "turns of text": (messages({"role": "user", "text": "1 + 2?"}, A), Chat([Q, A])),
    "content beside null": (messages({**Q, "value": None, "text": None}, A), Chat([Q, A])),
    "conversation": ({"conversation": [Q, A]}, Chat([Q, A])),
    "a row of a table with columns of other forms": (
        {"text": None, "prompt": None, "messages": [Q, A], "label": None}, Chat([Q, A])),
    "pairs": (
        {
            "conversation": [
                {"human": "1 + 2?", "assistant": "3"},
                {"human": "and 4?", "assistant": "7"},
            ]
        },
        Chat([Q, A, Q2, A2]),
    ),
    "pairs with a system text": (
        {"conversation": [{"system": "Add.", "input": "1 + 2?", "output": "3"}]}, Chat([S, Q, A])),
    "system beside messages": (messages(Q, A, system="Add."), Chat([S, Q, A])),
    "the same system twice": (messages(S, Q, A, system="Add."), Chat([S, Q, A])),
    "developer": (messages({**S, "role": "developer"}, Q, A), Chat([S, Q, A])),
    "parts": (messages(Q, {"role": "assistant", "content": [{"type": "text", "text": "3"}]}),
        Chat([Q, A])),
    "Gemini's parts": (messages(
        {"role": "user", "parts": [{"text": "1 + 2?"}]}, {"role": "model", "parts": [{"text": "3"}]}
    ), Chat([Q, A])),
    "roles of either form, with content under any of its keys": (
        messages(
            {"role": "Human", "value": "1 + 2?"},
            {"from": "gpt", "value": None, "content": "3"},
            {"role": "user", "text": "and 4?"},
            {"from": "model", "text": "7"},
        ),
        Chat([Q, A, Q2, A2]),
    ),
    # A prompt of turns.
    "turns that are completed": ({"prompt": [S, Q, A, Q2], "completion": [A2]},
        Chat([S, Q, A, Q2, A2], prompt=4)),
    "with a system text": ({"prompt": [Q], "completion": [A], "system": "Add."},
        Chat([S, Q, A], prompt=2)),
    "completed by text": ({"prompt": [Q], "completion": "3"}, Chat([Q, A], prompt=1)),
    "turns that are completed, as text": (
        {"prompt": json.dumps([Q]), "completion": json.dumps([A])}, Chat([Q, A], prompt=1)),
    "turns as text in lines": (
        {"prompt": json.dumps([Q], indent=1), "completion": json.dumps([A], indent=1)},
        Chat([Q, A], prompt=1)),
    # Markers of turns.
    **{
        f"{key}={value}": (
            messages(Q, {**A, key: value}, Q2, {**A2, key: 1}),
            Chat([Q, A, Q2, A2], unlearned=frozenset({1})),
        )
        for key in ("weight", "train", "trainable", "loss", "training")
        for value in (0, False, 0.0)
    },
    "no mark": (messages(Q, {**A, "weight": None}), Chat([Q, A])),
    "a mark of ShareGPT's": ({"conversations": [HUMAN, {**GPT, "loss": False}, HUMAN, GPT]},
        Chat([Q, A, Q, A], unlearned=frozenset({1}))),
    # Tool calls.
    "calls as text": (messages(Q, asks(call('{"a": 1}')), RESULT, A), Chat(CALLED)),
    "all calls as text": (
        messages(Q, {**asks(), "tool_calls": json.dumps([call({"a": 1})])}, RESULT, A),
        Chat(CALLED)),
    **{
        f"arguments {arguments!r}": (
            messages(Q, asks(call(arguments)), RESULT, A),
            Chat([Q, asks(call({})), RESULT, A]),
        )
        for arguments in (None, "", "null", "{}", {})
    },
    "no arguments": (messages(Q, asks({"function": {"name": "add"}}), RESULT, A),
        Chat([Q, asks(call({})), RESULT, A])),
    "parameters": (messages(Q, asks({"name": "add", "parameters": {"a": 1}}), RESULT, A),
        Chat(CALLED)),
    **{
        f"arguments as {key}": (
            messages(Q, asks({"name": "add", **nothing, key: value}), RESULT, A),
            Chat(CALLED),
        )
        for key in ("args", "input", "parameters")
        for nothing, value in (({}, {"a": 1}), ({"arguments": None}, '{"a": 1}'))
    },
    "arguments beside the function": (
        messages(Q, asks({"function": {"name": "add"}, "arguments": {"a": 1}}), RESULT, A),
        Chat(CALLED)),
    "function_call": (
        messages(
            Q,
            {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 1}'}},
            {"role": "function", "content": "3"},
            A,
            functions=[SCHEMA],
        ),
        Chat(CALLED, [TOOL]),
    ),
    "function_call beside text": (
        messages(Q, {**A, "function_call": {"name": "add", "arguments": "{}"}}, RESULT, A),
        Chat([Q, asks(call({}), content="3"), RESULT, A])),
    "function_call beside no calls": (
        messages(
            Q,
            {**A, "content": "", "tool_calls": "[]", "function_call": call({"a": 1})["function"]},
            *(RESULT, A),
        ),
        Chat(CALLED),
    ),
    "tools without their wrapper": (messages(Q, A, tools=json.dumps([SCHEMA])),
        Chat([Q, A], [TOOL])),
    "tools as texts": (messages(Q, A, tools=[json.dumps(TOOL)]), Chat([Q, A], [TOOL])),
    "a text, then its call": (
        {
            "conversations": [
                HUMAN,
                GPT,
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "3"},
                GPT,
            ]
        },
        Chat([Q, asks(call({"a": 1}), content="3"), RESULT, A]),
    ),
    "calls and results as turns of their own": (
        messages(
            Q,
            {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 1}}'},
            {"role": "tool_response", "content": "3"},
            A,
        ),
        Chat(CALLED),
    ),
    "a text that is marked, then its call": (
        messages(Q, {**A, "weight": 1}, asks(call({"a": 1})), RESULT, A),
        Chat([Q, asks(call({"a": 1}), content="3"), RESULT, A])),
    "a call, then another": (
        messages(Q, asks(call({"a": 1})), asks(call({"a": 2})), RESULT, RESULT, A),
        Chat([Q, asks(call({"a": 1}), call({"a": 2})), RESULT, RESULT, A])),
    # Reasoning.
    **{
        key: (messages(Q, {**A, key: "hm"}), Chat([Q, {**A, "reasoning_content": "hm"}]))
        for key in ("reasoning_content", "reasoning", "thinking", "thought")
    },
    "a thought twice": (messages(Q, {**A, "reasoning": "hm", "reasoning_content": "hm"}),
        Chat([Q, {**A, "reasoning_content": "hm"}])),
    "calls twice": (
        messages(Q, asks({**call({"a": 1}), "id": "x"}, function_call=call({"a": 1})["function"]),
                 RESULT, A),
        Chat([Q, asks({"id": "x", **call({"a": 1})}), RESULT, A]),
    ),
    "thoughts as a part": (
        messages(
            Q,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "3"}],
            },
        ),
        Chat([Q, {**A, "reasoning_content": "hm"}]),
    ),
}  # fmt: skip


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
    segments = [
        {"label": False, "text": "a "},
        {"label": True, "text": "b"},
        {"label": True, "text": "c"},
    ]
    assert pieces({"segments": segments}) == [Piece("a bc", ((2, 3), (3, 4)))]
    open_end = [*segments, {"label": False, "text": " d"}]
    assert pieces({"segments": open_end}) == [
        Piece("a bc d", ((2, 3), (3, 4)), end_is_learned=False)
    ]
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
        "id": 0,
        "label": None,
    }
    document, notes = read(row, {})
    assert document == Chat([Q, A, Q2, A2])
    assert [name for kind, name in notes if kind == "columns"] == ["chosen", "rejected", "id"]
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
    "weight 0.5": (messages(Q, {**A, "weight": 0.5}), "weight=0.5, which must be 0 or false"),
    "weight of text": (messages(Q, {**A, "weight": "no"}), 'weight="no", which must be'),
    "marks of parts": (messages(Q, {**A, "train_detail": [{}]}), "train_detail, which marks parts"),
    "arguments cut": (messages(Q, asks(call('{"a": 1')), RESULT, A),
        "calls add with arguments that are not valid JSON: Expecting"),
    "arguments a list": (messages(Q, asks(call([1])), RESULT, A), "not an object {...}: [1]"),
    "arguments a number": (messages(Q, asks(call("3")), RESULT, A), "not an object {...}: '3'"),
    "arguments under an unknown name": (
        messages(Q, asks({"name": "add", "kwargs": {"a": 1}}), RESULT, A),
        "with kwargs: the key of its arguments must be one of arguments, parameters, args, input"),
    "a misspelt key": ({"mesages": [Q, A]},
        "has 'mesages'; did you mean messages? data.columns.messages=mesages names the turns"),
    "one of two keys misspelt": ({"prompt": "1 + 2?", "completions": "3"},
        "has 'completions'; did you mean completion? 'data.columns={prompt="),
    "a misspelt key that makes no document": ({"completions": "3"}, "needs either text, or prompt"),
    "no name": (messages(Q, asks({"function": {}}), RESULT, A), "needs the name of a function"),
    "no tools": (messages(Q, A, tools="add"), "tools must be an array of objects"),
    "one turn": ({"role": "user", "text": "a?"},
        "is one turn of a conversation (role is 'user'): write all turns of a conversation in one "
        "row, as messages; data.columns.text=text reads each as a text"),
    "one turn of ShareGPT": ({"from": "gpt", "value": "b"}, "data.columns.text=value reads each"),
    "two systems": (messages(S, Q, A, system="Other."), "has two system texts"),
    "template values": (
        {**messages(Q, A), "chat_template_kwargs": ["a"]},
        "chat_template_kwargs must be an object, not list",
    ),
    "own variables": (
        {**messages(Q, A), "chat_template_kwargs": {"tools": []}},
        "has chat_template_kwargs that hold tools, which the turns and columns of each row give",
    ),
    "text and call marked": (messages(Q, {**A, "weight": 0}, asks(call({})), RESULT, A),
        "marks a text and the tool call after it differently; they form one turn"),
    "history of three": ({"query": "a", "response": "b", "history": [["a", "b", "c"]]},
        "history must hold pairs"),
    "no completion": ({"prompt": [Q], "completion": [Q]}, "has no assistant turn"),
    "a completion without an answer": ({"prompt": [Q, A], "completion": [Q]},
        "no assistant turn in its completion"),
    "two thoughts": (messages(Q, {**A, "reasoning": "a", "thinking": "b"}),
        "a turn has thoughts in reasoning and thinking, which differ"),
    "a thought and a part": (
        messages(Q, {**A, "content": [{"type": "thinking", "thinking": "a"}], "thought": "b"}),
        "a turn has thoughts in thought and content, which differ"),
    "two kinds of calls": (messages(Q, asks(call({}), function_call={"name": "other"}), RESULT, A),
        "a turn has tool_calls and function_call, which differ"),
    "a call of the user": (messages({**Q, "tool_calls": [call({})]}, A),
        "a turn of the role user calls tools"),
    "calls that complete a text": ({"prompt": [Q, A], "completion": [asks(call({})), RESULT, A]},
        "has a completion that begins with calls of the prompt's last turn"),
    "thoughts no text": (messages(Q, {**A, "thinking": ["hm"]}), "thinking of a turn must be a"),
    "labels of others": ({"input_ids": [1, 2], "labels": [2, -100]},
        "label 2 at position 0, but input_ids has 1: a label is the token itself, or -100"),
    "a mask of halves": ({"input_ids": [1, 2], "loss_mask": [0.5, 1]},
        "loss_mask must be an array of 0 and 1"),
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
    "null alone": ({"prompt": "1", "completion": None}, "completion must be a string, not None"),
    "labels too few": ({"input_ids": [1, 2], "labels": [1]}, "has 2 input_ids, but 1 labels"),
    "ids no numbers": ({"input_ids": [1, 2.5]}, "input_ids must be an array of integers"),
    "a segment without label": ({"segments": [{"text": "a"}]}, "label true or false"),
    "arrays that end before others": (
        {"conversations": {"from": ["human", "gpt", "human"], "value": ["1 + 2?", "3"]}},
        "is an object of arrays that differ in length: 3 from, 2 value"),
    "a turn without content": (messages({"role": "user", "message": "1 + 2?"}, A),
        "a turn needs content or value; it has role, message"),
    "content and value": (messages({**Q, "value": "2?"}, A), "has content and value, which differ"),
    "deep parts": (messages({**Q, "content": nested("a")}, A), "is nested too deeply"),
    "deep keys": (messages({**Q, "more": nested("a")}, A), "is nested too deeply"),
    "texts for turns": (messages("1 + 2?", "3"), "an object with role and content, not str"),
    "a turn of nothing": (messages(Q, {**A, "content": None}), "an empty assistant turn"),
    "a question of nothing": (messages({**Q, "content": None}, A), "a user turn has no content"),
    "a part without a text": (messages(*CALLED[:2], {**RESULT, "content": [{"deg": 1}]}, A),
        "has a part without a text; it has ['deg']"),
}  # fmt: skip


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
