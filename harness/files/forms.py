"""Forms of a record: the columns that make up a document, and how to read them."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from harness.files.chat import Chat, chat_of, completed, one_turn
from harness.files.notes import Note
from harness.files.pieces import Ids, Piece, Spans, pieces_of
from harness.files.preferences import CHOSEN, REJECTED
from harness.files.preferences import COLUMNS as OF_PREFERENCES
from harness.files.turns import (
    ASSISTANT,
    MARKS,
    Turn,
    are_turns,
    begins_with_turn,
    is_role,
    pairs_of,
    parsed,
    turns_of,
)

_QUESTIONS = ("question", "query", "prompt", "instruction", "input", "problem", "source", "user")
# In preference data: the answer to train on, and part of the name of the rejected one.
_CHOSEN_NAMES, _REJECTED = "chosen", "reject"
_OF_SYSTEM = ("system", "system_prompt")
"""Columns of a conversation's system text; the first that a record has is read."""
_ROLES = {"role", "from"}
_ID_NAME = re.compile(r"(^|_)(id|uuid|guid|version|url|uri|hash|sha|date|time|lang|language)$")
_ID_VALUE = re.compile(r"[\w.:/-]*\d[\w.:/-]*")
_INPUTS = ("input", "context")
"""Columns that accompany an instruction, in Alpaca's and in Dolly's form."""
_ANSWERS = (
    *("answer", "response", "completion", "output", "solution", "target", "reply"),
    *("summary", "assistant", _CHOSEN_NAMES),
)


_OF_TEXTS = ("text", "content", "body", "code", "document", "article")


def example(columns: Mapping[str, str]) -> str:
    """Return columns as a command-line argument that names them, quoted for a shell."""
    pairs = [f"{key}={json.dumps(name, ensure_ascii=False)}" for key, name in columns.items()]
    (key, name), *more = columns.items()
    if not more and name.isidentifier():
        return f"data.columns.{key}={name}"
    return shlex.quote(f"data.columns={{{', '.join(pairs)}}}")


def naming(record: Mapping[str, object]) -> str:
    """Return the argument that names the document's columns, to end a sentence; "" if there are no
    columns.
    """
    kept = {key: value for key, value in record.items() if _REJECTED not in key.lower()}
    if said := _of_lists(kept):
        return said
    texts = [key for key, value in kept.items() if isinstance(value, str)]
    if tools := [key for key in ("tools", "functions") if kept.get(key)]:
        return f": {tools[0]} belong to a conversation: write messages, and calls as tool_calls"
    turns = [key for key, value in kept.items() if begins_with_turn(value)]
    answers = _like(texts, _ANSWERS)
    if len(turns) == 1 and not answers:
        return f": {example({'messages': turns[0]})} names the turns"
    if "instruction" in texts and not turns and len(answers) == 1:
        names = ["instruction", *(key for key in _INPUTS if key in texts)][:2]
        columns = dict(zip(("instruction", "input"), names, strict=False))
        columns["output"] = answers[0]
        return f": {example(columns)} learns only {answers[0]}, as a chat"
    names = turns + answers if len(turns) == 1 else turns or texts
    if pair := _pair(names):
        question, answer = pair
        said = f": {example({'prompt': question, 'completion': answer})} learns only {answer}"
        if turns:
            return said
        chat = example({"question": question, "answer": answer})
        return f"{said}, as text after {question}; {chat} makes them a chat"
    is_part = _like(texts, (*_QUESTIONS, *_ANSWERS)) not in ([], [_CHOSEN_NAMES])
    worded = [key for key in texts if not _is_id(key, str(kept[key]))]
    if turns or is_part or not worded:
        return ": name the columns to read in data.columns" if kept else ""
    if len(texts) == 1:
        return f": {example({'text': texts[0]})} names the text"
    named = _like(worded, _OF_TEXTS) or worded
    longest = max(named, key=lambda key: len(str(kept[key])))
    return f": name the columns to read in data.columns, as in {example({'text': longest})}"


def _is_id(name: str, value: str) -> bool:
    """Return True for an id, a version, a number or an address, by the name or the value."""
    return bool(_ID_NAME.search(name.lower()) or _ID_VALUE.fullmatch(value.strip()))


def _of_lists(record: Mapping[str, object]) -> str:
    """Return how to convert a record whose content is a list that is no conversation; "" if it has
    no such list.
    """
    for key, value in record.items():
        if not isinstance(value, list) or begins_with_turn(value) or key in COLUMNS:
            continue
        if len(value) > 1 and all(isinstance(item, str) for item in value):
            return f": write {key} as turns, which are objects with role and content"
        if value and all(isinstance(item, dict) and not item.keys() & _ROLES for item in value):
            said = f": {key} holds a list of records: write each as a line of its own"
            return f"{said}, or those of a conversation with the keys role and content"
    return ""


def _like(names: list[str], words: tuple[str, ...]) -> list[str]:
    """Return the names that contain one of the words."""
    return [name for name in names if any(word in name.lower() for word in words)]


def _pair(names: list[str]) -> tuple[str, str] | None:
    """Return the columns of a question and its answer; None if their names do not tell."""
    answers = _like(names, _ANSWERS)
    names = [name for name in names if name not in _OF_SYSTEM]
    questions = [name for name in _like(names, _QUESTIONS) if name not in answers]
    if (
        len(names) == 2 and len(answers) + len(questions) == 1
    ):  # one name tells; the other column is its counterpart
        questions = questions or [name for name in names if name not in answers]
        answers = answers or [name for name in names if name not in questions]
    if len(answers) == len(questions) == 1:
        return questions[0], answers[0]
    return None


Document = Chat | Ids | Iterator[Piece]
Values = Mapping[str, Any]
_NOT_LEARNED = -100
"""The label that excludes a token from the loss, as in torch and transformers."""
_TAGS, _CHOSEN = ("label", "kto_tag"), "chosen"
"""Columns that are false for a bad answer, and the column of the good answer in preference data."""
_OPPOSITES = {"False": "True", "false": "true", "FALSE": "TRUE", "0": "1", "0.0": "1.0"}
"""Values that mark a row as not to be learned, each with its opposite; in a table they are text."""
_MASKS: tuple[str, ...] = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns with a 1 for each token to train on; a 0 in any of them excludes the token."""


@dataclass(frozen=True)
class Form:
    """A form: required columns, a function from values to a document, and optional columns."""

    needs: tuple[str, ...]
    document: Callable[[Values], Document]
    may: tuple[str, ...] = ()
    is_second: bool = False
    """True: used only for records without another form, such as `segments` beside a text."""


def _text(row: Values, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        how = ": store the column as strings" * isinstance(value, bytes)
        how = f': write it as text, as in "{value}"' if isinstance(value, int | float) else how
        how = f": {example({'messages': key})} reads the turns" if begins_with_turn(value) else how
        raise ValueError(f"{key} must be a string, not {type(value).__name__}{how}")
    value.encode()  # a lone surrogate, "\ud800", is valid JSON but not valid text
    return value


def _completion(row: Values) -> Iterator[Piece]:
    prompt, completion = _text(row, "prompt"), _text(row, "completion")
    whole = prompt + completion
    return pieces_of(whole, [(len(prompt), len(whole))])


def _segments(row: Values) -> Iterator[Piece]:
    """Return axolotl's segments as pieces; their texts are concatenated unchanged."""
    segments = parsed(row["segments"])
    if not isinstance(segments, list) or not segments:
        raise ValueError("segments must be an array of objects with text and label")
    whole, learned, label = "", [], False
    for segment in segments:
        if not isinstance(segment, dict) or segment.get("label") not in (True, False):
            raise ValueError("a segment must be an object with text, and label true or false")
        text, label = _text({"text": segment.get("text") or ""}, "text"), bool(segment["label"])
        if label and text:
            learned.append((len(whole), len(whole) + len(text)))
        whole += text
    return pieces_of(whole, learned, closed=label)


def _token_ids(row: Values) -> Ids:
    """Return ids with their labels, without the padding that attention_mask marks."""
    ids = _integers(row, "input_ids")
    others = ("labels", "attention_mask", *_MASKS)
    beside = {key: _integers(row, key) for key in others if row.get(key) is not None}
    for key, values in beside.items():
        if len(values) != len(ids):
            raise ValueError(f"has {len(ids)} input_ids, but {len(values)} {key}")
    labels, kept = beside.pop("labels", ids), beside.pop("attention_mask", [1] * len(ids))
    for mask in beside.values():
        labels = [label if own else _NOT_LEARNED for label, own in zip(labels, mask, strict=True)]
    ids = [token for token, is_kept in zip(ids, kept, strict=True) if is_kept]
    labels = [label for label, is_kept in zip(labels, kept, strict=True) if is_kept]
    learned: Spans = []
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label == _NOT_LEARNED:
            continue
        if label != token:
            raise ValueError(
                f"has the label {label} at position {place}, but input_ids has {token}: a label is "
                f"the token itself, or {_NOT_LEARNED} (not learned); labels must not be shifted"
            )
        if learned and learned[-1][1] == place:
            learned[-1] = (learned[-1][0], place + 1)
        else:
            learned.append((place, place + 1))
    return Ids(ids, learned)


def _integers(row: Values, key: str) -> list[int]:
    values, is_mask = parsed(row[key]), key in _MASKS  # masks may hold booleans and floats
    if not isinstance(values, list) or not all(
        value in (0, 1) if is_mask else type(value) is int for value in values
    ):
        raise ValueError(f"{key} must be an array of {'0 and 1' if is_mask else 'integers'}")
    return [int(value) for value in values]


def _chat(row: Values, turns: list[Turn]) -> Chat:
    """Return the conversation of `turns` and the other columns of a row."""
    if row.get("history"):
        turns = [*pairs_of(row["history"]), *turns]
    return chat_of(turns, **{key: row.get(key) for key in _OF_CHATS[1:]})


def _instruction(row: Values) -> Chat:
    more = _text(row, "input") if row.get("input") else ""
    question = "\n\n".join(part for part in (_text(row, "instruction"), more) if part)
    return _chat(row, one_turn(question, _text(row, "output")))


def _one_turn(question: str, answer: str) -> Form:
    def document(row: Values) -> Chat:
        return _chat(row, one_turn(_text(row, question), _text(row, answer)))

    return Form((question, answer), document, _OF_CHATS)


def _turns(column: str, *, is_second: bool = False) -> Form:
    def document(row: Values) -> Chat:
        return _chat(row, turns_of(row[column], column))

    return Form((column,), document, _OF_CHATS[1:], is_second)


def _completed(row: Values) -> Chat:
    more = {key: row.get(key) for key in _OF_CHATS[1:]}
    return completed(row["prompt"], row["completion"], **more)


_VALUES = "chat_template_kwargs"
_OF_CHATS: tuple[str, ...] = ("history", "system", "tools", "functions", _VALUES)
_TURNS: set[str] = {"messages", "conversations", "conversation"}
_TEXT_PAIR = Form(("prompt", "completion"), _completion)
_TURNS_PAIR = Form(("prompt", "completion"), _completed, _OF_CHATS[1:])
FORMS = (
    Form(("text",), lambda row: pieces_of(_text(row, "text"))),
    _TEXT_PAIR,
    Form(("instruction", "output"), _instruction, ("input", *_OF_CHATS)),
    _one_turn("question", "answer"),
    _one_turn("query", "response"),
    _turns("messages"),
    _turns("conversations"),
    _turns("conversation", is_second=True),
    Form(("input_ids",), _token_ids, ("labels", "attention_mask", *_MASKS), is_second=True),
    Form(("segments",), _segments, is_second=True),
)
COLUMNS = tuple(dict.fromkeys(name for form in FORMS for name in (*form.needs, *form.may)))
WANTED = ", or ".join(" and ".join(form.needs) for form in FORMS)


def read(record: object, columns: Mapping[str, str]) -> tuple[Document, list[Note]]:
    """Return the document of a record, and notes on the columns with content that are not read.

    `columns`: the record's name of each of COLUMNS, or empty for these names. Raises ValueError.
    """
    if not isinstance(record, dict):
        wanted = '{"messages": [...]}' if begins_with_turn(record) else '{"text": "..."}'
        raise ValueError(f"must be an object, not {type(record).__name__}: write it as {wanted}")
    if not columns:
        _require_no_turn(record)
    columns = columns or _own_names(record)
    form = _form_of(record, columns)
    columns = {**_companions(record, form, columns), **columns}
    if missing := [columns[name] for name in form.needs if columns[name] not in record]:
        raise ValueError(f"lacks {', '.join(missing)} (data.columns); it has {', '.join(record)}")
    names = [name for name in (*form.needs, *form.may) if name in columns]
    try:
        if record.get(_CHOSEN) and {*form.needs} <= _TURNS:
            _require_answer(record[columns[form.needs[0]]], columns[form.needs[0]])
        document = form.document({name: record.get(columns[name]) for name in names})
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    used = {columns[name] for name in names}
    if form.needs != ("text",):
        _require_learned(record, used)
    notes: list[Note] = [
        ("columns", str(key))
        for key, value in record.items()
        if key not in used and value not in (None, "", [], {})
    ]
    return document, [*notes, *(document.notes if isinstance(document, Chat) else ())]


def _require_no_turn(record: Mapping[str, object]) -> None:
    """Raise ValueError for a row that is one turn of a conversation."""
    role = next((key for key in ("role", "from") if is_role(record.get(key))), None)
    text = next((key for key in ("content", "value", "text") if key in record), None)
    if role and text and not record.keys() & {*_TURNS}:
        raise ValueError(
            f"is one turn of a conversation ({role} is {record[role]!r}): write all turns of a "
            f"conversation in one row, as messages; data.columns.text={text} reads each as a text"
        )


def _own_names(record: Mapping[str, object]) -> dict[str, str]:
    """Return the columns that a record has under their standard names. Null columns are left out if
    the others make a document, because in a table of several forms every row has all columns.
    """
    names = {name: name for name in COLUMNS if name in record}
    if system := [name for name in _OF_SYSTEM if name in record]:
        names["system"] = system[0]
    filled = {name: own for name, own in names.items() if record[own] is not None}
    return filled if any(filled.keys() >= {*form.needs} for form in FORMS) else names


def _companions(
    record: Mapping[str, object], form: Form, columns: Mapping[str, str]
) -> dict[str, str]:
    """Return the record's own columns that belong to a form of which data.columns names a part,
    such as the tools of a conversation or the labels of token ids.
    """
    own = {name: name for name in form.may if name in record and name != _INPUTS[0]}
    if "system" in form.may and (system := [name for name in _OF_SYSTEM if name in record]):
        own["system"] = system[0]
    return {name: key for name, key in own.items() if key not in columns.values()}


def _require_answer(turns: object, column: str) -> None:
    """Raise ValueError for a preference whose conversation ends before the answer."""
    role = turns_of(turns, column)[-1].message["role"]
    if role != ASSISTANT:
        columns = example({"prompt": column, "completion": _CHOSEN})
        raise ValueError(
            f"has {column} that end with a turn of the {role}, and the answer in {_CHOSEN}: "
            f"{columns} learns only {_CHOSEN}"
        )


def _require_learned(record: Mapping[str, object], used: set[str]) -> None:
    """Raise ValueError if a column of the row says that it must not be trained on."""
    whys = dict.fromkeys(MARKS, "which marks turns, not rows")
    whys |= dict.fromkeys(_TAGS, "which marks an answer not to be learned")
    for key, why in whys.items():
        text = str(record.get(key)).strip()
        is_class = key in _TAGS and text[:1] == "0"  # a number in `label` may be any class
        if key not in used and text in _OPPOSITES and not is_class:
            raise ValueError(
                f"has {key}={record[key]!r}, {why}: remove the column, or leave out such rows with "
                f"data.where, as in data.where.{key}={_OPPOSITES[text]}"
            )


def _form_of(record: dict[str, Any], columns: Mapping[str, str]) -> Form:
    fitting = [form for form in FORMS if columns.keys() >= {*form.needs}]
    forms = [form for form in fitting if not form.is_second] or fitting
    if len(forms) != 1:
        if near := {} if forms else _misspelt(record):
            names = f"has {', '.join(map(repr, near))}; did you mean {', '.join(near.values())}?"
            raise ValueError(f"{names}{naming(record).removeprefix(':')}")
        needs = f"it has {', '.join(map(repr, record)) or 'no keys'}{naming(record)}"
        if forms:
            needs = f"it has {', and '.join(' and '.join(form.needs) for form in forms)}: name "
            needs += f"those to read, as in {example({name: name for name in forms[-1].needs})}"
        raise ValueError(f"needs either {WANTED}; {needs}")
    is_talk = forms[0] is _TEXT_PAIR and are_turns(record.get(columns["prompt"]))
    return _TURNS_PAIR if is_talk else forms[0]


def _misspelt(record: dict[str, Any]) -> dict[str, str]:
    """Return the standard names of keys that are misspelt; empty if they would make no document."""
    near = {
        key: similar[0]
        for key in record
        if key not in COLUMNS and len(key) < 99  # a longer one takes long to compare
        if (similar := get_close_matches(key.lower(), COLUMNS, 1, 0.85))
    }
    renamed = {near.get(key, key) for key in record}
    return near if any(renamed >= {*form.needs} for form in FORMS) else {}


def value_of(record: object, column: str) -> str:
    """Return a column's value as data.where writes it. Raises ValueError if the record has none."""
    if not isinstance(record, dict) or column not in record:
        has = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"has no {column!r} (data.where, data.balance); it has {has or 'no keys'}")
    value = record[column]
    if isinstance(value, dict | list):
        raise ValueError(f"{column} must be a string or a number, not {type(value).__name__}")
    return str(value)


def problem_of_columns(columns: Mapping[str, str]) -> str | None:
    """Return why the keys of data.columns do not make a document; None if they do."""
    known = dict.fromkeys((*COLUMNS, *OF_PREFERENCES))
    if unknown := [name for name in columns if name not in known]:
        return f"names {unknown[0]}, which is not one of {', '.join(known)}"
    if {CHOSEN, REJECTED} & columns.keys():
        return None
    forms = [form for form in FORMS if columns.keys() >= {*form.needs}]
    if columns and len(forms) != 1:
        pairs = "for preferences, chosen and rejected beside the prompt"
        return f"must name {WANTED} ({pairs}); it names {', '.join(columns)}"
    return None
