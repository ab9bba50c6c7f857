"""The documents of a corpus, in a fixed order."""

from __future__ import annotations

import codecs
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

from harness.errors import ConfigError
from harness.files.corpus_files import TOPICS, CorpusFiles, find_files
from harness.files.file_kinds import NO_UTF_8, Format, reads_lines, why_not_utf_8

# Most problems in a report, line numbers per problem, and bad lines before reading stops.
MAX_PROBLEMS, _NAMED_LINES, _MAX_LINES = 20, 5, 1000
# Longer documents are read and tokenised in pieces of about this size.
PIECE_CHARS = 1 << 17
# Tokenizers join a space to the word after it, not to the word before: a cut there changes no id.
_CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")


@dataclass(frozen=True)
class Piece:
    """A part of a document; a document is the run of pieces that ends with a `last` one."""

    text: str
    is_prompt: bool = False
    """Read, but not trained on."""
    is_last: bool = True


class Corpus(CorpusFiles):
    """Corpus files, with their documents."""

    def identity(self) -> list[object]:
        """Return names, sizes and modification times: they change if the documents may have."""
        stats = [(str(file), file.stat()) for file in self.files]
        return [
            self.kind if self.format is None else f"{self.kind} as {self.format}",
            sys.version if self.kind == "library" else "",
            [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        ]

    def pieces(self) -> Iterator[Piece]:
        """Yield every document in order, as pieces.

        Raises ConfigError with up to MAX_PROBLEMS problems, each with its file and lines.
        """
        problems = Problems()
        for file in self.files:
            try:
                if reads_lines(file, self.format):
                    yield from _json_lines(file, problems)
                elif self.kind == "library":
                    yield from _library_file(file)
                else:
                    yield from _text_file(file)
            except UnicodeDecodeError as error:
                problems.add(file, f"{error}; it {why_not_utf_8(file)}")
            except OSError as error:
                problems.add(file, str(error))
            if problems.are_enough:
                break
        if problems.lines:
            raise ConfigError(problems.texts())

    def name_of(self, document: int) -> str:
        """Return the file of a document; "" if finding it would take reading all files."""
        if self.kind == "indexed" or any(reads_lines(file, self.format) for file in self.files):
            return ""
        return str(self.files[min(document, len(self.files) - 1)])


def find_corpus(path: str | None, format: Format | None = None) -> Corpus:
    """Return the corpus that `data.path` names; raises ConfigError as find_files does."""
    return Corpus(**vars(find_files(path, format)))


@dataclass
class Problems:
    """Unreadable lines (0 for a whole file) by file and message."""

    lines: dict[tuple[Path, str], list[int]] = field(default_factory=dict)

    def add(self, file: Path, message: str, line: int = 0) -> None:
        """Add a problem."""
        self.lines.setdefault((file, message), []).append(line)

    @property
    def are_enough(self) -> bool:
        """True if the report is long enough to stop reading."""
        total = sum(map(len, self.lines.values()))
        return len(self.lines) >= MAX_PROBLEMS or total >= _MAX_LINES

    def texts(self) -> list[str]:
        """Return a sentence for each message of a file."""
        return [_problem(*of, lines) for of, lines in self.lines.items()]


def _problem(file: Path, message: str, lines: list[int]) -> str:
    if lines == [0]:
        return f"data.path: cannot read {file}: {message}"
    more = ""
    if len(lines) > 1:
        others = ", ".join(map(str, lines[1:_NAMED_LINES]))
        more = f" (so are lines {others}{' and more' if len(lines) > _NAMED_LINES else ''}; "
        more += f"{len(lines)}{' or more' if len(lines) >= _MAX_LINES else ''} in all)"
    return f"data.path: {file}:{lines[0]}: {message}{more}"


def _library_file(file: Path) -> Iterator[Piece]:
    if file.parts[-2:] != TOPICS.parts:
        with tokenize.open(file) as source:
            yield Piece(source.read())
        return
    for _, page in sorted(topics.items()):
        yield Piece(page)


def _text_file(file: Path) -> Iterator[Piece]:
    """Yield a file's text unchanged as one document, without a byte order mark."""
    with file.open(encoding="utf-8-sig", newline="") as opened:
        unread = ""
        while block := opened.read(PIECE_CHARS):
            unread += block
            if len(unread) > PIECE_CHARS:
                cut = _cut(unread, len(unread) // 2, len(unread))
                yield Piece(unread[:cut], is_last=False)
                unread = unread[cut:]
        yield Piece(unread)


def _cut(text: str, start: int, end: int) -> int:
    """Return a place in [start, end] where a cut changes no token id; `end` if there is none."""
    place = _CUT.search(text, start, end)
    return place.start() if place else end


def _json_lines(file: Path, problems: Problems) -> Iterator[Piece]:
    """Yield one document per nonblank line, adding unreadable ones to `problems`."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(codecs.BOM_UTF8).strip() if number == 1 else line.strip()
            if not text:
                continue
            try:
                yield from _document_of(json.loads(text.decode()))
            except UnicodeDecodeError as error:
                if number == 1 and (why := why_not_utf_8(file)) != NO_UTF_8:
                    return problems.add(file, f"it {why}")
                problems.add(file, str(error), number)
            except json.JSONDecodeError as error:
                problems.add(file, f"is no JSON: {error.msg} at column {error.colno}", number)
            except RecursionError:
                problems.add(file, "is JSON that is nested too deeply", number)
            except ValueError as error:
                problems.add(file, str(error), number)
            if problems.are_enough:
                return None


def _document_of(value: object) -> Iterator[Piece]:
    """Yield the pieces of one line's JSON value. Raises ValueError with the problem."""
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, not {type(value).__name__}")
    keys = [key for key in ("text", "prompt", "completion") if key in value]
    if keys not in (["text"], ["prompt", "completion"]):
        raise ValueError(
            "needs either text, or prompt and completion; "
            f"it has {', '.join(map(repr, value)) or 'no keys'}{_renaming(value)}"
        )
    for key in keys:
        if not isinstance(value[key], str):
            raise ValueError(f"{key} must be a string, not {type(value[key]).__name__}")
        value[key].encode()  # a lone surrogate, "\ud800", is valid JSON and no text
    if keys == ["text"]:
        yield from _pieces_of(value["text"])
    else:
        yield from _pieces_of(value["prompt"], is_prompt=True)
        yield from _pieces_of(value["completion"])


def _renaming(value: dict[str, object]) -> str:
    """Return the command that renames the only text of a line to "text"; "" if not unique."""
    texts = [key for key in value if isinstance(value[key], str) and key.isidentifier()]
    if len(texts) != 1 or {"prompt", "completion"} & value.keys():
        return ""
    return f": jq -c '{{text: .{texts[0]}}}' FILE > NEW makes {texts[0]} the text"


def _pieces_of(text: str, is_prompt: bool = False) -> Iterator[Piece]:
    """Yield a string in pieces, as text files are cut; a prompt does not end its document."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = _cut(text, start + PIECE_CHARS // 2, start + PIECE_CHARS)
        yield Piece(text[start:cut], is_prompt, is_last=False)
        start = cut
    yield Piece(text[start:], is_prompt, is_last=not is_prompt)
