"""Forms of a record: which of its columns are a document, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

from harness.files.chat import Chat, chat_of, one_turn
from harness.files.pieces import Piece, pieces_of

Document = Chat | Iterator[Piece]
Column = Literal[
    "text",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "question",
    "answer",
    "messages",
    "conversations",
    "system",
    "tools",
]
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """A form: the columns it needs, what makes a document of their values, columns it may have."""

    needs: tuple[Column, ...]
    document: Callable[[Values], Document]
    may: tuple[Column, ...] = ()


def _text(row: Values, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string, not {type(value).__name__}")
    value.encode()  # a lone surrogate, "\ud800", is valid JSON and no text
    return value


def _completion(row: Values) -> Iterator[Piece]:
    prompt, completion = _text(row, "prompt"), _text(row, "completion")
    return chain(pieces_of(prompt, is_learned=False, is_last=False), pieces_of(completion))


def _instruction(row: Values) -> Chat:
    more = _text(row, "input") if row.get("input") else ""
    question = "\n\n".join(part for part in (_text(row, "instruction"), more) if part)
    return one_turn(question, _text(row, "output"))


FORMS = (
    Form(("text",), lambda row: pieces_of(_text(row, "text"))),
    Form(("prompt", "completion"), _completion),
    Form(("instruction", "output"), _instruction, ("input",)),
    Form(
        ("question", "answer"), lambda row: one_turn(_text(row, "question"), _text(row, "answer"))
    ),
    Form(("messages",), lambda row: chat_of(row["messages"], row.get("tools")), ("tools",)),
    Form(
        ("conversations",),
        lambda row: chat_of(row["conversations"], row.get("tools"), row.get("system")),
        ("tools", "system"),
    ),
)
WANTED = ", or ".join(" and ".join(form.needs) for form in FORMS)


def document_of(record: object, columns: Mapping[str, str]) -> Document:
    """Return the document of a record. Raises ValueError with the problem.

    `columns`: the record's name of each column; without any the names are those of Column.
    """
    if not isinstance(record, dict):
        raise ValueError(f"must be an object, not {type(record).__name__}")
    columns = columns or {name: name for name in get_args(Column) if name in record}
    forms = [form for form in FORMS if columns.keys() >= {*form.needs}]
    if len(forms) != 1:
        needs = f"it has {', '.join(map(repr, record)) or 'no keys'}{_naming(record)}"
        if forms:
            needs = f"it has {', and '.join(' and '.join(form.needs) for form in forms)}: name "
            needs += f"those to read, as in {_example(forms[-1].needs)}"
        raise ValueError(f"needs either {WANTED}; {needs}")
    (form,) = forms
    if missing := [columns[name] for name in form.needs if columns[name] not in record]:
        raise ValueError(f"lacks {', '.join(missing)} (data.columns); it has {', '.join(record)}")
    names = [name for name in (*form.needs, *form.may) if name in columns]
    return form.document({name: record.get(columns[name]) for name in names})


def value_of(record: object, column: str) -> str:
    """Return a column's value as data.where names it. Raises ValueError if the record has none."""
    if not isinstance(record, dict) or column not in record:
        has = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"has no {column!r} (data.where, data.balance); it has {has or 'no keys'}")
    value = record[column]
    if isinstance(value, dict | list):
        raise ValueError(f"{column} must be a string or a number, not {type(value).__name__}")
    return str(value)


def problem_of_columns(columns: Mapping[str, str]) -> str | None:
    """Return why the keys of data.columns make no document; None if they do."""
    if unknown := [name for name in columns if name not in get_args(Column)]:
        return f"names {unknown[0]}, which is none of {', '.join(get_args(Column))}"
    forms = [form for form in FORMS if columns.keys() >= {*form.needs}]
    if columns and len(forms) != 1:
        return f"must name {WANTED}; it names {', '.join(columns)}"
    return None


def _example(names: tuple[str, ...]) -> str:
    return f"data.columns={{{', '.join(f'{name}={name!r}' for name in names)}}}".replace("'", '"')


def _naming(record: dict[str, object]) -> str:
    """Return the argument that names the only text of a record; "" if not unique."""
    texts = [key for key in record if isinstance(record[key], str)]
    unique = len(texts) == 1 and not record.keys() & set(get_args(Column))
    return f": data.columns.text={texts[0]} names the text" if unique else ""
