"""The records of a file that a source reads, and the kinds of their documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from harness.files.chat import Chat
from harness.files.data_format import BadLines, Records, problem_of
from harness.files.forms import Document, read, value_of
from harness.files.notes import Note
from harness.files.pieces import Ids, unless_blank

CHATS, TOKEN_IDS, TEXT = "a conversation", "token ids", "other text"
"""Kinds of documents, as messages name them. All documents of a corpus have the same kind."""
Result = TypeVar("Result")


def kind_of_document(document: object) -> str:
    """Return the kind of a document, or of the document that a piece is part of."""
    if isinstance(document, Chat):
        return CHATS
    return TOKEN_IDS if isinstance(document, Ids) else TEXT


def why_not_mixed(kind: str, first: tuple[str, str]) -> str:
    """Return the problem with a document of another kind than the `first`, a (kind, location)."""
    return f"holds {kind}, but {first[1]} holds {first[0]}: name one of them, or move it"


def rows_of(
    file: Path,
    records: Records,
    bad_lines: BadLines,
    where: Mapping[str, str],
    result_of: Callable[[object], Result],
) -> Iterator[tuple[int, object, Result]]:
    """Yield (line, record, result) of the records that match data.where; collect the bad ones."""
    for line, record in records:
        bad_lines.seen += 1
        try:
            if any(value_of(record, column) != value for column, value in where.items()):
                continue
            result = result_of(record)
        except ValueError as error:
            bad_lines.add(file, problem_of(error), line)
            if bad_lines.are_enough:
                return
        else:
            yield line, record, result


def documents_of(
    file: Path,
    records: Records,
    bad_lines: BadLines,
    where: Mapping[str, str],
    columns: Mapping[str, str],
) -> Iterator[tuple[int, object, tuple[Document, tuple[Note, ...]]]]:
    """Yield (line, record, (document, notes)). Blank texts are bad if bad rows are skipped."""

    def document_of(record: object) -> tuple[Document, tuple[Note, ...]]:
        document, notes = read(record, columns)
        if not isinstance(document, Chat | Ids) and bad_lines.limit is not None:
            document = unless_blank(document)
        return document, tuple(note for note in notes if note[1] not in where)

    return rows_of(file, records, bad_lines, where, document_of)
