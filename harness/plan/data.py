"""The data of a plan in one line, without a tokenizer and without reading all files."""

from __future__ import annotations

import json
from pathlib import Path

from harness.config.sections import DataConfig
from harness.errors import ConfigError
from harness.files.corpus_files import CorpusFiles, find_files
from harness.files.file_kinds import MOST_LINE_BYTES, first_line, reads_lines, why_not_utf_8
from harness.files.token_index import read_header

# Limits that keep a dry run fast.
_MOST_FILES = 20_000
_MOST_BYTES = 1 << 26
_SHOWN_CHARS = 60
_BYTES_PER_TOKEN = 4  # of English text, roughly


def glance(data: DataConfig) -> str:
    """Return kind, number and size of documents, and the first line of text.

    Raises ConfigError if the data cannot be read here.
    """
    corpus = find_files(data.path, data.format, at_most=_MOST_FILES)
    try:
        return _pair(corpus) if corpus.kind == "indexed" else _text(corpus)
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename}: {error.strerror}") from error


def _pair(corpus: CorpusFiles) -> str:
    header = read_header(corpus.files[1])
    tokens = corpus.files[0].stat().st_size // header.id_bytes
    return f"{header.bounds - 1:,} documents, {tokens:,} tokens in {corpus.files[0]}"


def _text(corpus: CorpusFiles) -> str:
    lines = [file for file in corpus.files if reads_lines(file, corpus.format)]
    at_least = "at least " if len(corpus.files) == _MOST_FILES else ""
    documents = len(corpus.files) - len(lines)
    left = _MOST_BYTES
    for file in lines:
        count, left = _count_lines(file, left)
        documents += count
        if not left:
            at_least = "at least "
            break
    source = "Python's own library" if corpus.kind == "library" else str(corpus.path)
    size = corpus.num_bytes()
    first = _begin(corpus.files[0], reads_lines(corpus.files[0], corpus.format))
    left_out = f"; left out: {corpus.left_out}" if corpus.left_out else ""
    return (
        f"{source}: {at_least}{documents:,} documents, {size / 2**20:,.1f} MiB (roughly "
        f"{size // _BYTES_PER_TOKEN:,} tokens), the first {first}{left_out}"
    )


def _count_lines(file: Path, most_bytes: int) -> tuple[int, int]:
    """Return the number of nonblank lines in the first `most_bytes` of a file, and bytes left."""
    documents = 0
    with file.open("rb") as opened:
        while most_bytes and (line := opened.readline(most_bytes)):
            most_bytes -= len(line)
            documents += bool(line.strip())
    return documents, most_bytes


def _begin(file: Path, is_lines: bool) -> str:
    """Return the quoted beginning of a file's first document, or the line that has none."""
    text = first_line(file, MOST_LINE_BYTES) if is_lines else first_line(file)
    if text is None:
        raise ConfigError(f"data.path: cannot read {file}: it {why_not_utf_8(file)}")
    if not is_lines:
        return f"begins {shortened(text)!r}"
    try:
        value = json.loads(text)
        first = next(str(value[key]) for key in ("text", "prompt") if key in value)
        return f"begins {shortened(first)!r}"
    except (ValueError, TypeError, StopIteration, RecursionError):
        return f"cannot be read from {shortened(text)!r}"


def shortened(text: str) -> str:
    """Return the first nonblank line of a text, cut to the length of a row."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS - 3]}..."
