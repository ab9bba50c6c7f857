"""Files beside data that are not data: the hub's, git's, and those meant for people."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.files.splits import NAME as CARD
from harness.files.splits import is_card

_INFOS = ("dataset_infos.json", "dataset_info.json")
_FOR_READERS = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|code_of_conduct|authors)"
    r"([-_][\w-]+)?(\.(md|txt|rst|cff|bib|html))?"
)
_BUILDS = (b"GeneratorBasedBuilder", b"ArrowBasedBuilder", b"BuilderConfig")
_MOST_SCRIPT_BYTES = 1 << 20
_NAMED = 6
DOT_FILES, DOT_FOLDERS = "dot files", "dot folders"


def beside_data(files: Iterable[Path], *, of_texts: bool) -> dict[Path, str]:
    """Return the files that are not read, each with a remark on what it is. Raises OSError.

    `of_texts`: the others are texts or code, so a README is one of them unless it is a data card.
    """
    beside = {}
    for file in files:
        if file.name == CARD and is_card(file, beside_texts=of_texts):
            beside[file] = " (data card)"
        elif file.name in _INFOS or (not of_texts and is_for_readers(file)):
            beside[file] = ""
        elif not of_texts and file.suffix == ".py" and _is_loader(file):
            beside[file] = " (loading script)"
    return beside


def is_for_readers(file: Path) -> bool:
    """Return True if a file's name says that it describes data."""
    return file.name in _INFOS or _FOR_READERS.fullmatch(file.name.lower()) is not None


def _is_loader(file: Path) -> bool:
    with file.open("rb") as opened:
        script = opened.read(_MOST_SCRIPT_BYTES)
    return any(name in script for name in _BUILDS)


def left_out_text(beside: dict[Path, str], counts: Counter[str]) -> str:
    """Return a summary of a folder's unread files: the names of a few, and counts of the others."""
    return ", ".join([*_names(beside), *_counts(counts)])


def _names(beside: dict[Path, str]) -> Iterator[str]:
    kinds = Counter(f"{file.name}{what}" for file, what in beside.items())
    for name, count in sorted(kinds.items())[:_NAMED]:
        yield name if count == 1 else f"{count} {name}"
    if more := sum(count for _, count in sorted(kinds.items())[_NAMED:]):
        yield f"{more} more such files"


def _counts(counts: Counter[str]) -> Iterator[str]:
    for kind, count in sorted((+counts).items(), key=lambda item: (-item[1], item[0])):
        is_one = count == 1 and kind in (DOT_FILES, DOT_FOLDERS)
        yield f"{count} {kind.removesuffix('s') if is_one else kind}"
