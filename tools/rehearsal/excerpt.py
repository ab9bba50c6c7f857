"""The first part of a job's own data: as many files and lines as a rehearsal can tokenise."""

from __future__ import annotations

from pathlib import Path

from harness.data.corpus import find_corpus
from harness.files.file_kinds import format_of

MOST_BYTES = 4 * 2**20
MOST_FILES = 256


def excerpt(path: str, folder: Path, format: str | None = None, split: str | None = None) -> str:
    """`path` itself, where it is small or holds token ids, which are read where they lie; else a
    copy under `folder` of the beginnings of the first files of its split, with their names.

    Raises ConfigError where there is no text, as a run would.
    """
    corpus = find_corpus(path, format, split=split)
    if corpus.kind == "indexed" or corpus.num_bytes() <= MOST_BYTES:
        return path
    files = corpus.files[:MOST_FILES]
    for file in files:
        inside = file.relative_to(corpus.path) if corpus.path.is_dir() else Path(file.name)
        copy = folder / inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(format_of(file, format).excerpt(file, MOST_BYTES // len(files)))
    return str(folder if corpus.path.is_dir() else folder / corpus.path.name)
