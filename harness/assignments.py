"""Dotted keys, the same for the run config and for the DeepSpeed JSON: `key=value`, hints."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

COMMAND_LINE = "command line"


def parse_assignment(text: str) -> tuple[str, Any]:
    """Key and value, split at the first "="; raises ValueError for a text without the two."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ValueError(f"{text!r} is not key=value, as in train.steps=100")
    return key, parse_value(value.strip())


def parse_value(text: str) -> Any:
    """A TOML value; a bare word, or what TOML would read as a date, is a string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = table["value"]
    return text if len(table) > 1 or isinstance(value, datetime.date | datetime.time) else value


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a nested dict, making the dicts on the way.

    Raises ValueError where the way leads through something that is not a dict.
    """
    *path, last = key.split(".")
    for depth, name in enumerate(path, 1):
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ValueError(f"{key} cannot be set: {'.'.join(path[:depth])} is {child!r}")
        tree = child
    tree[last] = value


def assign_all(tree: dict[str, Any], texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Put every `key=value` into a nested dict; returns the keys set, and what went wrong."""
    keys, problems = [], []
    for text in texts:
        try:
            key, value = parse_assignment(text)
            assign(tree, key, value)
            keys.append(key)
        except ValueError as error:
            problems.append(f"{error} ({COMMAND_LINE})")
    return keys, problems


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a nested dict with its value; an empty dict counts as a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of an error sentence: "; did you mean X?", or nothing where no name is like `word`.

    The last part of a dotted name counts most: a long common section would make all keys of it
    look alike. Where none is like it, a few that share half of its words are: batch_size may mean
    global_batch or micro_batch.
    """
    names = list(names)

    def likeness(name: str) -> tuple[float, float]:
        last, other = word.rpartition(".")[2], name.rpartition(".")[2]
        return SequenceMatcher(None, last, other).ratio(), SequenceMatcher(None, word, name).ratio()

    def words(name: str) -> set[str]:
        return set(name.rpartition(".")[2].split("_"))

    nearest = max(names, key=likeness, default="")
    if likeness(nearest)[0] >= 0.6:
        return f"; did you mean {nearest}?"
    sharing = [name for name in names if len(words(name) & words(word)) >= len(words(word)) / 2]
    return f"; did you mean {' or '.join(sharing)}?" if 1 <= len(sharing) <= 3 else ""
