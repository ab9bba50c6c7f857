"""Where text comes from, and its documents in a fixed order."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from harness.errors import ConfigError

Kind = Literal["library", "text", "indexed"]
MAX_PROBLEMS = 20
# Longer documents are read and tokenised in pieces of about this many characters.
PIECE_CHARS = 1 << 17
_SKIPPED_FOLDERS = {"dist-packages", "idle_test", "idlelib", "site-packages", "test", "tests"}
# A dict of manual pages: read as prose, one document each, after all sources.
_TOPICS = Path("pydoc_data", "topics.py")
# Tokenizers join a space to the word after it, not to the word before: a cut there changes no id.
_CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")


@dataclass(frozen=True)
class Piece:
    """A part of a document; a document is the run of pieces that ends with a `last` one."""

    text: str
    is_prompt: bool = False
    """Read, but not learned."""
    is_last: bool = True


@dataclass(frozen=True)
class Corpus:
    """Files that hold documents. `path` is the prefix of the pair when `kind` is "indexed"."""

    kind: Kind
    path: Path
    files: tuple[Path, ...]

    def identity(self) -> list[object]:
        """Changes whenever the documents may have changed: names, sizes, modification times."""
        stats = [(str(file), file.stat()) for file in self.files]
        return [
            self.kind,
            sys.version if self.kind == "library" else "",
            [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        ]

    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.stat().st_size for file in self.files)

    def pieces(self) -> Iterator[Piece]:
        """Every document in order, as pieces; raises ConfigError with up to MAX_PROBLEMS of the
        lines that cannot be read, each with file and line."""
        problems: list[str] = []
        for file in self.files:
            try:
                if file.suffix == ".jsonl":
                    yield from _json_lines(file, problems)
                elif self.kind == "library":
                    yield from _library_file(file)
                else:
                    yield from _text_file(file)
            except (OSError, UnicodeDecodeError) as error:
                problems.append(f"data.path: cannot read {file}: {error}")
            if len(problems) >= MAX_PROBLEMS:
                break
        if problems:
            raise ConfigError(problems)

    def name_of(self, document: int) -> str:
        """The file of a document; "" where that takes reading them all."""
        if self.kind == "indexed" or any(file.suffix == ".jsonl" for file in self.files):
            return ""
        return str(self.files[min(document, len(self.files) - 1)])


def find_corpus(path: str | None) -> Corpus:
    """What `data.path` names: None is Python's library; raises ConfigError if there is no text."""
    if path is None:
        return _library()
    given = Path(path).expanduser()
    is_half = given.suffix in (".bin", ".idx")
    prefix = given.with_suffix("") if is_half else given
    pair = (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
    if is_half or (not given.exists() and any(file.exists() for file in pair)):
        return Corpus("indexed", prefix, pair)
    if not given.exists():
        raise ConfigError(f"data.path: {path} does not exist (nor {pair[0].name} beside it)")
    files = (given,) if given.is_file() else tuple(_files_under(given))
    if not any(file.stat().st_size for file in files):
        raise ConfigError(f"data.path: {path} is empty: {len(files)} files, 0 bytes")
    return Corpus("text", given, files)


def _files_under(folder: Path) -> list[Path]:
    inside = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    visible = [file for file in inside if not any(part.startswith(".") for part in file.parts)]
    return [folder / file for file in sorted(visible, key=lambda file: file.parts)]


def _library() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    kept = []
    for folder, folders, names in os.walk(root):
        # Not entered: site-packages alone may hold a hundred times as many files.
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        inside = Path(folder).relative_to(root)
        kept += [inside / name for name in names if name.endswith(".py")]
    if not kept:
        raise ConfigError(
            f"data.path: this Python keeps no sources under {root}; give a file or folder of text"
        )
    ordered = sorted(kept, key=lambda file: (file == _TOPICS, file.parts))
    files = tuple(root / file for file in ordered)
    return Corpus("library", root, files)


def _library_file(file: Path) -> Iterator[Piece]:
    if file.parts[-2:] != _TOPICS.parts:
        with tokenize.open(file) as source:
            yield Piece(source.read())
        return
    for _, page in sorted(topics.items()):
        yield Piece(page)


def _text_file(file: Path) -> Iterator[Piece]:
    """One document, as it is: line ends are kept."""
    with file.open(encoding="utf-8", newline="") as opened:
        held = ""
        while block := opened.read(PIECE_CHARS):
            held += block
            if len(held) > PIECE_CHARS:
                found = _CUT.search(held, len(held) // 2)
                cut = found.start() if found else len(held)
                yield Piece(held[:cut], is_last=False)
                held = held[cut:]
        yield Piece(held)


def _json_lines(file: Path, problems: list[str]) -> Iterator[Piece]:
    """One document per line; blank lines are none. Problems are added to the list given."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield from _document_of(json.loads(line.strip().decode()))
            except ValueError as error:
                problems.append(f"data.path: {file}:{number}: {error}")
                if len(problems) >= MAX_PROBLEMS:
                    return


def _document_of(value: object) -> list[Piece]:
    """The pieces of one line's JSON value; ValueError says what is wrong with it."""
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, not {type(value).__name__}")
    keys = [key for key in ("text", "prompt", "completion") if key in value]
    if keys not in (["text"], ["prompt", "completion"]):
        raise ValueError(
            "needs either text, or prompt and completion; "
            f"it has {', '.join(map(repr, value)) or 'no keys'}"
        )
    for key in keys:
        if not isinstance(value[key], str):
            raise ValueError(f"{key} must be a string, not {type(value[key]).__name__}")
        value[key].encode()  # a lone surrogate, "\ud800", is valid JSON and no text
    if keys == ["text"]:
        return [Piece(value["text"])]
    return [Piece(value["prompt"], is_prompt=True, is_last=False), Piece(value["completion"])]
