"""key=value arguments: dotted keys, suggestions for typos, and limits on user input."""

import datetime
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

MAX_FILE_BYTES = 4 * 2**20
"""Maximum size of a config file; configs written by people have a few kilobytes."""
MAX_DEPTH = 64
"""Maximum nesting depth of tables and arrays."""
MAX_INTEGER = 2**63 - 1
"""Largest integer in TOML and in a tensor."""
_DOTTED = re.compile(r"""[\w"'-]++(?:\s*+\.\s*+[\w"'-]++)*+""")


def parsed_toml(text: str) -> dict[str, Any]:
    """Return TOML text as a dict. Raises TOMLDecodeError, and ValueError beyond the limits."""
    # tomllib stores every prefix of a dotted key: gigabytes for a megabyte of text.
    if any(match[0].count(".") > MAX_DEPTH for match in _DOTTED.finditer(text)):
        raise ValueError(f"a key in it has more than {MAX_DEPTH} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def beyond_bounds(tree: Any, depth: int = 0) -> str | None:
    """Return a problem if a parsed config holds a value that cannot be stored or passed on."""
    if isinstance(tree, dict):
        items = [*tree, *tree.values()]
    else:
        items = tree if isinstance(tree, list) else []
    is_bad = depth > MAX_DEPTH
    if isinstance(tree, int):
        is_bad |= abs(tree) > MAX_INTEGER
    elif isinstance(tree, str):  # a surrogate stands for a byte that is not UTF-8
        is_bad |= "\0" in tree or tree != tree.encode(errors="ignore").decode()
    if is_bad:
        return "it is nested too deeply, or has an integer of more than 64 bits or invalid text"
    return next(filter(None, (beyond_bounds(item, depth + 1) for item in items)), None)


COMMAND_LINE = "command line"
IMPLIED = "default with model.init_from"
BY_SIZE = "default by size"
BY_RANKS = "default, rounded up for the ranks"
COUNTED = "follows from the data"
CHOSEN = "default for this model, data and machine"
TODAY = "the day on which the run began"
KEPT = "as the run began"
DECIDED = (IMPLIED, BY_SIZE, BY_RANKS, COUNTED, CHOSEN, TODAY, KEPT)
"""Origins of values that the user left open and the plan decided."""


def parse_assignment(text: str) -> tuple[str, Any]:
    """Return key and value, split at the first "=".

    Raises ValueError if either is missing or the value exceeds the limits of a config.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    names = key.split(".")
    if not equals or not all(names):
        raise ValueError(f"{text!r} is not key=value, as in train.steps=100")
    if len(names) > MAX_DEPTH:
        raise ValueError(f"{names[0]}... has {len(names):,} parts: no key has that many")
    try:
        parsed = parse_value(value.strip())
    except ValueError as error:
        raise ValueError(f"{key} is {error}") from None
    if problem := beyond_bounds({key: parsed}):
        raise ValueError(f"{key}: {problem}")
    return key, parsed


def parse_value(text: str) -> Any:
    """Return the text as a TOML value; a bare word or a TOML date stays a string.

    Raises ValueError for an integer with thousands of digits, and for thousands of brackets.
    """
    try:
        table = parsed_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except ValueError:
        raise ValueError(
            f"{text[:20]}..., which is too large or too deeply nested to read"
        ) from None
    value = table["value"]
    return text if len(table) > 1 or isinstance(value, datetime.date | datetime.time) else value


def value_as_text(value: Any) -> str:
    """Return a value in the form that `parse_value` reads: JSON, except for tables."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_as_text, value))}]"
    if isinstance(value, Mapping):
        items = (f"{json.dumps(key)} = {value_as_text(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    return json.dumps(value, ensure_ascii=False)


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a nested dict, creating intermediate dicts.

    Raises ValueError if an intermediate key holds something other than a dict.
    """
    *path, last = key.split(".")
    for depth, name in enumerate(path, 1):
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ValueError(f"{key} cannot be set: {'.'.join(path[:depth])} is {child!r}")
        tree = child
    tree[last] = value


def assign_all(
    tree: dict[str, Any], texts: Iterable[str], sections: Iterable[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Set every `key=value` in a nested dict; return what was set, by key, and the problems.

    A table for one of `sections` sets the keys in it, and leaves the section's others.
    """
    assigned, problems = dict[str, Any](), []
    for text in texts:
        try:
            key, value = parse_assignment(text)
            of_section = key in sections and isinstance(value, dict)
            each = {f"{key}.{name}": item for name, item in value.items()} if of_section else {}
            for name, item in (each if of_section else {key: value}).items():
                assign(tree, name, item)
                assigned[name] = item
        except ValueError as error:
            problems.append(f"{error} ({COMMAND_LINE})")
    return assigned, problems


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key of a nested dict with its value; an empty dict counts as a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def multiples_near(size: int, unit: int) -> str:
    """Return the multiples of a unit just below and above a size, as text."""
    below = size // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple)


NAMED_AT_ONCE = 3
"""Up to this many unknown keys get one sentence each; more share one."""
_LISTED = 8


def listed(keys: Iterable[str]) -> str:
    """Return the first few keys as text, with the number of the others."""
    keys = list(keys)
    shown = ", ".join(keys[:_LISTED])
    return shown if len(keys) <= _LISTED else f"{shown} and {len(keys) - _LISTED} more"


# Minimum similarity of a probable typo: train.stpes has 0.8, lora and lr 0.67.
_NEAR = 0.8
_LONGEST = 100  # characters; no key is longer


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" to end an error sentence, or "" if no name is similar.

    The last part of a dotted name counts most; otherwise a long section name would make all its
    keys look similar. If no name is similar, up to three names that contain all its words (except
    "size") are suggested: batch_size may mean global_batch or micro_batch.
    """
    names = list(names) if len(word) <= _LONGEST else []

    def likeness(name: str) -> tuple[float, float]:
        last, last_of_name = word.rpartition(".")[2], name.rpartition(".")[2]
        return SequenceMatcher(None, last, last_of_name).ratio(), SequenceMatcher(
            None, word, name
        ).ratio()

    def words(name: str) -> set[str]:
        return set(name.rpartition(".")[2].replace("-", "_").split("_"))

    nearest = max(names, key=likeness, default="")
    if likeness(nearest)[0] >= _NEAR:
        return f"; did you mean {nearest}?"
    telling = words(word) - {"size", ""}
    sharing = [name for name in names if telling and telling <= words(name)]
    return f"; did you mean {' or '.join(sharing)}?" if 1 <= len(sharing) <= 3 else ""
