"""The data card of a hub's data set: which of its files are which split.

A card is a README.md that begins with YAML. Its `configs` are read, in the part of YAML that the
hub writes; a card that needs more is one that names no files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

NAME = "README.md"
_MOST_BYTES = 1 << 22
_FILES = {"configs", "dataset_info"}
_KEYS = _FILES | {
    *("annotations_creators", "language", "language_creators", "license", "multilinguality"),
    *("pretty_name", "size_categories", "source_datasets", "task_categories", "task_ids"),
}
"""Keys of cards, of which pages of other sites have none or few."""
# No part of it may match in two ways: a line of spaces would take hours.
_KEY = re.compile(r"""("[^"]*"\s*|'[^']*'\s*|[^\s"'\[\]{}#:-][^:#]*):(?:\s+(.*))?$""")
_MOST_IN_BRACKETS = 1 << 13
"""Longest text in brackets, in characters: dividing it takes its square."""
_Lines = list[tuple[int, str]]  # indentation and text of each


@dataclass(frozen=True)
class Subset:
    """An entry of `configs`: patterns of its files by split."""

    name: str
    is_default: bool
    patterns: dict[str, list[str]]


def is_card(file: Path, *, beside_texts: bool = True) -> bool:
    """Return True if a Markdown file begins as a data card does, and beside texts as no page of
    another site does. Raises OSError.
    """
    keys = {key for key, _ in _top_level(_front_matter(file))}
    if not beside_texts:
        return bool(keys)
    return bool(keys & _FILES) or len(keys & _KEYS) > 1


def subsets_of(file: Path) -> list[Subset]:
    """Return the subsets whose files a card names; none without a card. Raises OSError."""
    if not file.is_file():
        return []
    blocks = [block for key, block in _top_level(_front_matter(file)) if key == "configs"]
    try:
        top: Any = _block(blocks[0], 0)[0] if blocks else {}
        subsets = [_subset(config) for config in top.get("configs") or ()]
    except (ValueError, IndexError, TypeError, AttributeError, KeyError, RecursionError):
        return []
    return [subset for subset in subsets if subset.patterns]


def _subset(config: dict[str, Any]) -> Subset:
    files, folder = config.get("data_files"), str(config.get("data_dir") or "").strip("/")
    if isinstance(files, str):
        files = [files]
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    patterns: dict[str, list[str]] = {}
    for entry in files if isinstance(files, list) else ():
        of = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = of["path"] if isinstance(of["path"], list) else [of["path"]]
        inside = [f"{folder}/{path}" if folder else str(path) for path in paths]
        patterns.setdefault(str(of.get("split", "train")), []).extend(inside)
    name = str(config.get("config_name", "default"))
    return Subset(name, name == "default" or config.get("default") == "true", patterns)


def matches(name: str, pattern: str) -> bool:
    """Return True if the path of a file inside the folder is one that a pattern names."""
    parts, path = _parts_of(pattern), name.split("/")
    reached = {0}  # numbers of parts of the path that the pattern may have named so far
    for part in parts:
        if part == "**":
            reached = {*range(min(reached), len(path) + 1)}
        else:
            reached = {at + 1 for at in reached if at < len(path) and _names(part, path[at])}
        if not reached:
            return False
    return bool(parts)


def _parts_of(pattern: str) -> list[str]:
    """Return the parts of a pattern; "**" is always one of its own."""
    apart = re.sub(r"(^|/)\*\*(?=[^/])", r"\1**/*", pattern.removeprefix("./"))
    return [part for part in apart.split("/") if part]


def _names(pattern: str, part: str) -> bool:
    try:
        return fnmatchcase(part, pattern)
    except re.error:  # as of [z-a]
        return False


def _front_matter(file: Path) -> _Lines:
    """Return the lines between the first two "---", without comments; none without them."""
    with file.open("rb") as opened:
        lines = opened.read(_MOST_BYTES).decode("utf-8-sig", errors="replace").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return []
    stripped = [line.rstrip() for line in lines]
    if "---" not in stripped[1:]:
        return []
    inside = stripped[1 : stripped.index("---", 1)]
    return [
        (len(line) - len(line.lstrip()), line.lstrip())
        for line in inside
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _top_level(lines: _Lines) -> list[tuple[str, _Lines]]:
    """Return each key without indentation, with its line and those that belong to it."""
    blocks: list[tuple[str, _Lines]] = []
    for indent, text in lines:
        if not indent and not _is_item(text) and (key := _KEY.match(text)):
            blocks.append((key[1].rstrip(), []))
        if blocks:
            blocks[-1][1].append((indent, text))
    return blocks


def _is_item(text: str) -> bool:
    return text == "-" or text.startswith("- ")


def _block(lines: _Lines, at: int) -> tuple[object, int]:
    """Return the value that begins in a line, and the line behind it."""
    own, text = lines[at]
    if _is_item(text):
        return _items(lines, at)
    if _KEY.match(text) is None:
        return _scalar(text), at + 1
    values: dict[str, object] = {}
    while at < len(lines) and lines[at][0] == own and (key := _KEY.match(lines[at][1])):
        rest = _without_comment(key[2] or "")
        at += 1
        if rest:
            value: object = _scalar(rest)
        elif at < len(lines) and (
            lines[at][0] > own or (lines[at][0] == own and _is_item(lines[at][1]))
        ):
            value, at = _block(lines, at)
        else:
            value = None
        values[str(_scalar(key[1]))] = value
    return values, at


def _items(lines: _Lines, at: int) -> tuple[list[object], int]:
    own, items = lines[at][0], list[object]()
    while at < len(lines) and lines[at][0] == own and _is_item(lines[at][1]):
        rest = lines[at][1][1:].lstrip()
        if not rest:
            if at + 1 >= len(lines) or lines[at + 1][0] <= own:
                raise ValueError("an item without a value")
            value, at = _block(lines, at + 1)
        else:
            lines[at] = (own + len(lines[at][1]) - len(rest), rest)
            value, at = _block(lines, at)
        items.append(value)
    return items, at


def _without_comment(text: str) -> str:
    if text.startswith("#"):
        return ""
    quoted = 1 + max(text.rfind(quote) for quote in "\"'")
    comment = re.compile(r"\s#").search(text, quoted)
    return text[: comment.start()].rstrip() if comment else text


def _scalar(text: str) -> object:
    """Return a text without its quotes, or a list or an object in brackets."""
    text = _without_comment(text).strip()
    if text[:1] in ("|", ">", "&", "*", "!"):
        raise ValueError(f"{text[:1]} is not read")
    if text[:1] in ("[", "{"):
        if not text.endswith("]" if text[0] == "[" else "}"):
            raise ValueError("brackets over several lines are not read")
        if len(text) > _MOST_IN_BRACKETS:
            raise ValueError(f"brackets of {len(text):,} characters are not read")
        parts = re.findall(r"""(?:"[^"]*"|'[^']*'|\{[^}]*\}|\[[^]]*\]|[^,])+""", text[1:-1])
        if text[0] == "[":
            return [_scalar(part) for part in parts]
        pairs = [part.partition(":") for part in parts]
        return {str(_scalar(key)): _scalar(value) for key, _, value in pairs}
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text
