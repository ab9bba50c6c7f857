"""The documents of a corpus, in a fixed order."""

from __future__ import annotations

import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeVar

from harness.errors import ConfigError
from harness.files.arrow_rows import Place, filled_places, remove_nulls
from harness.files.chat import Chat
from harness.files.corpus_files import TOPICS, CorpusFiles, find_files
from harness.files.data_format import BadLines, Records, problem_of
from harness.files.file_kinds import format_of
from harness.files.first_bytes import why_not_utf_8
from harness.files.forms import Document, read, value_of
from harness.files.notes import Note
from harness.files.pieces import Ids, Piece, pieces_of
from harness.files.preferences import read_preference

CHATS, TOKEN_IDS, TEXT = "a conversation", "token ids", "other text"
"""Kinds of documents, as messages name them. All documents of a corpus have the same kind."""
_BLANK: Note = ("turns", "blank texts (only their end is learned)")
_FILLED: Note = ("turns", "nulls that fill up objects to equal keys, as Arrow does")
Result = TypeVar("Result")


def why_not_mixed(kind: str, first: tuple[str, str]) -> str:
    """Return the problem with a document of another kind than the `first`, a (kind, location)."""
    return f"holds {kind}, but {first[1]} holds {first[0]}: name one of them, or move it"


@dataclass(frozen=True)
class Part:
    """A conversation, a list of token ids, or a piece of a text, and its location."""

    document: Chat | Ids | Piece
    file: Path
    line: int
    kind: str
    """Kind of the document. All documents of a corpus have the same kind."""
    num_characters: int
    """Length of the text, or the number of token ids."""
    is_last: bool
    """True if the document ends with this part."""
    record: object = None
    """The record that contains it; None if the document is a whole file."""
    notes: tuple[Note, ...] = ()
    """Content of the record that is not used; attached to the first piece of a document."""

    @classmethod
    def of(cls, document: Chat | Ids | Piece, file: Path, line: int, *record: Any) -> Part:
        """Return a document, or a piece of one, with its location, record and notes."""
        if isinstance(document, Piece):
            return cls(document, file, line, TEXT, len(document.text), document.is_last, *record)
        if isinstance(document, Ids):
            return cls(document, file, line, TOKEN_IDS, len(document.ids), True, *record)
        return cls(document, file, line, CHATS, document.num_characters, True, *record)


@dataclass(frozen=True)
class ReadLimit:
    """Where a dry run stops reading: enough to see what a run would reject at once."""

    records: int = 1000
    """Records, or documents of files without records."""
    characters: int = 1 << 19


@dataclass(frozen=True)
class Corpus(CorpusFiles):
    """Corpus files and their documents."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Column names of a document's fields in the records (data.columns)."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Values that records must have in some columns (data.where)."""
    bad_rows_limit: float | None = None
    """Maximum number of bad records to skip (BadLines.limit); None: skip none."""
    between: tuple[int, int] | None = None
    """Byte range of its only file from which lines are read; None: whole files."""
    leading: tuple[str, str] | None = None
    """For a part of a corpus: kind and location of the whole corpus's first document. None: these
    files contain the first document."""
    limit: ReadLimit | None = None
    """Where `parts` stops; None: at the end."""
    preferences: str = ""
    """The objective (train.objective) whose pairs its records are read as; "" for documents."""

    def identity(self) -> list[object]:
        """Return names, sizes and modification times, which change whenever documents do."""
        stats = [(str(file), file.stat()) for file in self.files]
        return [
            self._kind(),
            sys.version if self.kind == "library" else "",
            [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        ]

    def _kind(self) -> str:
        """Return the part of the identity that describes how the files are read."""
        kind = self.kind if self.format is None else f"{self.kind} as {self.format}"
        kind = f"{kind} with {sorted(self.columns.items())}" if self.columns else kind
        kind = f"{kind} where {sorted(self.where.items())}" if self.where else kind
        kind = f"{kind} in pairs" if self.preferences else kind
        return kind if self.bad_rows_limit is None else f"{kind} without bad rows"

    def bad_lines(self) -> BadLines:
        """Return an empty list of bad lines with this corpus's limit."""
        return BadLines(limit=self.bad_rows_limit)

    def parts(self, bad_lines: BadLines) -> Iterator[Part]:
        """Yield every document in order, as all_parts does; with a `limit`, the first ones."""
        if self.limit is None:
            yield from self.all_parts(bad_lines)
            return
        characters = documents = 0
        for part in self.all_parts(bad_lines):
            characters += part.num_characters
            documents += part.is_last
            bad_lines.is_cut = characters >= self.limit.characters
            if bad_lines.is_cut and isinstance(part.document, Piece):
                cut = replace(part.document, is_last=True)
                part = replace(part, document=cut, is_last=True)
            yield part
            if bad_lines.is_cut or max(documents, bad_lines.seen) >= self.limit.records:
                bad_lines.is_cut = True
                return

    def all_parts(self, bad_lines: BadLines) -> Iterator[Part]:
        """Yield every document in order, as pieces or as a conversation, and collect bad lines.

        Documents of another kind than the first are bad lines: otherwise a README in the folder
        would be trained on beside conversations, and token ids get no bos token.
        """
        first = self.leading
        for file in self.files:
            try:
                for part in self._parts_of(file, bad_lines):
                    first = first or (part.kind, f"{file}:{part.line}")
                    if part.kind == first[0]:
                        yield part
                        continue
                    text = why_not_mixed(part.kind, first)
                    if part.record is None:
                        bad_lines.add(file, f"it {text}")
                        break
                    if part.is_last:
                        bad_lines.add(file, text, part.line)
            except UnicodeDecodeError as error:
                bad_lines.add(file, f"{error}; it {why_not_utf_8(file)}")
            except OSError as error:
                bad_lines.add(file, str(error))
            if bad_lines.are_enough:
                break

    def _read(self, record: object) -> tuple[Document, list[Note]]:
        """Return a record's document, or pair, and notes. Raises ValueError."""
        if self.preferences:
            return read_preference(record, self.columns, self.preferences)
        return read(record, self.columns)

    def _parts_of(self, file: Path, bad_lines: BadLines) -> Iterator[Part]:
        if self.kind == "library":
            yield from (Part.of(piece, file, 1) for piece in _library_file(file))
            return
        format = format_of(file, self.format)
        if format.records is None:
            assert format.pieces is not None, "a format has pieces or records"
            if self.where:
                bad_lines.add(file, f"has no columns, but data.where is {dict(self.where)}")
                return
            yield from (Part.of(piece, file, 1) for piece in format.pieces(file, bad_lines))
            return
        records = format.records(file, bad_lines)
        if self.between is not None:
            assert format.records_between is not None, "a file with bounds has it"
            records = format.records_between(file, bad_lines, *self.between)
        head = partial(format.records, file, BadLines())  # of the whole file, in each part of it
        places = cache(lambda: filled_places(head()))
        rows = documents_of(file, records, bad_lines, self.where, self._read, places)
        for line, record, (document, notes) in rows:
            for part in [document] if isinstance(document, Chat | Ids) else document:
                yield Part.of(part, file, line, record, notes)
                notes = ()

    @cached_property
    def holds_chats(self) -> bool:
        """True if the documents are conversations."""
        return self.first_document is not None and self.first_document[0] == CHATS

    @cached_property
    def holds_text(self) -> bool:
        """True if the documents are text, to which a tokenizer may add a bos token."""
        kind = self.first_document[0] if self.first_document else TEXT
        return self.kind != "indexed" and kind == TEXT

    @cached_property
    def first_document(self) -> tuple[str, str] | None:
        """Kind and location of the first document; None if there is no document."""
        if self.leading is not None or self.kind != "text":
            return self.leading
        part = next(self.parts(self.bad_lines()), None)
        return (part.kind, f"{part.file}:{part.line}") if part else None

    @property
    def note(self) -> str:
        """How the files are read if their names do not tell; otherwise ""."""
        files = self.files if self.kind == "text" else ()
        return next((format_of(file, self.format).note(file) for file in files), "")

    def chats(self) -> Iterator[Chat]:
        """Yield the documents if they are conversations."""
        for part in self.parts(self.bad_lines()) if self.holds_chats else ():
            if isinstance(part.document, Chat):
                yield part.document

    def pieces(self) -> Iterator[Piece]:
        """Yield every document in order, as pieces. Conversations come without a template; a prompt
        comes separately from its completion.

        Raises ConfigError with up to MAX_PROBLEMS problems, each with its first file and line.
        """
        bad_lines = self.bad_lines()
        for part in self.parts(bad_lines):
            if isinstance(part.document, Chat):
                yield from pieces_of("\n".join(turn["content"] for turn in part.document.messages))
            elif isinstance(part.document, Ids):
                raise ConfigError(holds_ids(f"{part.file}:{part.line}"))
            else:
                yield from part.document.divided()
        bad_lines.require_good_rows()

    def name_of(self, document: int) -> str:
        """Return the file of a document, or "" if finding it would mean reading all files."""
        if self.kind == "indexed" or any(format_of(f, self.format).count for f in self.files):
            return ""
        return str(self.files[min(document, len(self.files) - 1)])


def find_corpus(
    path: str | None,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    split: str | None = None,
    bad_rows_limit: float | None = None,
    limit: ReadLimit | None = None,
    preferences: str = "",
) -> Corpus:
    """Return the corpus that data.path names. Raises ConfigError as find_files does."""
    files = find_files(path, format, split=split)
    if preferences and files.kind != "text":
        raise ConfigError(
            f"data.path: {files.path} holds no records of chosen and rejected answers, as "
            f"train.objective={preferences} needs them"
        )
    if where and files.kind != "text":
        raise ConfigError(f"data.where is {dict(where)}, but {files.path} has no columns")
    return Corpus(
        **vars(files),
        columns=columns or {},
        where=where or {},
        bad_rows_limit=bad_rows_limit if files.kind == "text" else None,
        limit=limit,
        preferences=preferences,
    )


def holds_ids(path: Path | str) -> str:
    """Return the problem with token ids at a path for a run without a tokenizer."""
    return f"data.path: {path} holds token ids: set data.tokenizer to the one that wrote them"


def _library_file(file: Path) -> Iterator[Piece]:
    if file.parts[-2:] != TOPICS.parts:
        with tokenize.open(file) as source:
            yield Piece(source.read())
        return
    for _, page in sorted(topics.items()):
        yield Piece(page)


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
    read: Callable[[object], tuple[Document, list[Note]]],
    places: Callable[[], set[Place]],
) -> Iterator[tuple[int, object, tuple[Document, tuple[Note, ...]]]]:
    """Yield (line, record, (document, notes)). Blank texts are bad if bad rows are skipped."""

    def document_of(record: object) -> tuple[Document, tuple[Note, ...]]:
        filled = remove_nulls(record, places)
        document, notes = read(record)
        notes += [_FILLED] * filled
        if not isinstance(document, Chat | Ids):
            document = iter(pieces := [*document])
            is_blank = not any(piece.text.strip() for piece in pieces)
            if is_blank and bad_lines.limit is not None:
                raise ValueError("is blank: nothing to learn")
            notes += [_BLANK] * is_blank
        return document, tuple(note for note in notes if note[1] not in where)

    return rows_of(file, records, bad_lines, where, document_of)
