"""Trees of dicts and lists with something changed, and texts of them with something changed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from tests.fuzz.values import RAW, TEXTS, hostile

Slot = tuple[Any, Any]
"""A dict or list, and a key or index in it."""


def slots(tree: Any) -> list[Slot]:
    """Every place of a tree that holds a value."""
    keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))]
    found = []
    for key in keys:
        found.append((tree, key))
        if isinstance(tree[key], dict | list):
            found += slots(tree[key])
    return found


def spoil(draw: random.Random, tree: dict[str, Any], changes: int | None = None) -> str:
    """Change a few places of a tree; returns what was done."""
    told = []
    for _ in range(changes or draw.choice((1, 1, 1, 2, 3))):
        places = slots(tree)
        if not places:
            tree[draw.choice(TEXTS)] = hostile(draw)
            told.append("a key where there was none")
            continue
        holder, key = draw.choice(places)
        change = draw.choice(_CHANGES)
        before = repr(holder[key])
        told.append(f"{change.__name__.strip('_')} at {key!r}, which was {before[:40]}")
        try:
            change(draw, holder, key, places)
        except (OverflowError, ValueError):  # a number beyond what its change can count
            holder[key] = None
    return "; ".join(told)


def _replaced(draw: random.Random, holder: Any, key: Any, _: list[Slot]) -> None:
    holder[key] = hostile(draw)


def _removed(_draw: random.Random, holder: Any, key: Any, _: list[Slot]) -> None:
    del holder[key]


def _misspelt(draw: random.Random, holder: Any, key: Any, _: list[Slot]) -> None:
    if isinstance(holder, dict):
        name = str(key)
        spellings = [name[:-1], name + "s", name.upper(), f"_{name}", name.replace("_", "-"), ""]
        holder[draw.choice(spellings)] = holder.pop(key)
    else:
        holder.append(holder[key])


def _added(draw: random.Random, holder: Any, _key: Any, _: list[Slot]) -> None:
    if isinstance(holder, dict):
        name = draw.choice(
            ("enabled", "type", "comment", "_comment", "", "0", "stagee", "ü", "a.b")
        )
        holder[name] = hostile(draw)
    else:
        holder.append(hostile(draw))


def _of_another_type(draw: random.Random, holder: Any, key: Any, _: list[Slot]) -> None:
    value = holder[key]
    others: list[Callable[[], Any]] = [lambda: [value], lambda: {"value": value}]
    if isinstance(value, bool | int | float | str):
        others += [lambda: str(value), lambda: str(value).lower()]
    if isinstance(value, bool | int | float):
        others += [lambda: bool(value), lambda: value + 0.5]
    if isinstance(value, dict):
        others += [lambda: [*value.items()], lambda: True]
    holder[key] = draw.choice(others)()


def _nudged(draw: random.Random, holder: Any, key: Any, _: list[Slot]) -> None:
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = draw.choice([value + 1, value - 1, -value, value * 2, value * 1000, 0])
    elif isinstance(value, float):
        holder[key] = draw.choice([value * 1.5, -value, value * 1e6, 0.0, int(value)])
    elif isinstance(value, str):
        holder[key] = draw.choice([value + "_", value[1:], value.upper(), value * 2])
    else:
        holder[key] = draw.choice([None, [], {}])


def _like_another(draw: random.Random, holder: Any, key: Any, places: list[Slot]) -> None:
    other, name = draw.choice(places)
    try:
        holder[key] = other[name]
    except (LookupError, TypeError):  # an earlier change removed it
        holder[key] = None
    if _contains(holder[key], holder):  # a circle is no tree
        holder[key] = None


def _contains(tree: Any, part: Any) -> bool:
    if tree is part:
        return True
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return any(_contains(value, part) for value in values)


_CHANGES = (
    *(_replaced, _replaced, _removed, _misspelt, _added),
    *(_of_another_type, _nudged, _nudged, _like_another),
)


def spoil_text(draw: random.Random, text: str) -> tuple[bytes, str]:
    """A text of which something below its grammar is changed, and what."""
    at = draw.randrange(len(text) + 1)
    end = min(len(text), at + draw.choice((1, 1, 5, 40)))
    lines = text.splitlines(keepends=True) or [""]
    line = draw.randrange(len(lines))
    changes: dict[str, Callable[[], str | bytes]] = {
        "empty": lambda: "",
        "only blanks": lambda: " \n\t\n",
        "cut off": lambda: text[:at],
        "a part removed": lambda: text[:at] + text[end:],
        "a part doubled": lambda: text[:end] + text[at:],
        "a line doubled": lambda: "".join([*lines[: line + 1], *lines[line:]]),
        "a line removed": lambda: "".join([*lines[:line], *lines[line + 1 :]]),
        "a comment": lambda: "".join([*lines[:line], "// a comment\n", *lines[line:]]),
        "a trailing comma": lambda: re.sub(r"\n(\s*[}\]])", r",\n\1", text, count=1),
        "single quotes": lambda: text.replace('"', "'"),
        "NUL": lambda: text[:at] + "\0" + text[at:],
        "a control character": lambda: text[:at] + "\x1b" + text[at:],
        "a lone surrogate": lambda: text[:at] + "\\ud800" + text[at:],
        "a raw value": lambda: text[:at] + draw.choice([*RAW.values()]) + text[end:],
        "BOM": lambda: b"\xef\xbb\xbf" + text.encode(),
        "UTF-16": lambda: text.encode("utf-16"),
        "Latin-1": lambda: (text[:at] + "\xfc" + text[at:]).encode("latin-1", "replace"),
        "CRLF": lambda: text.replace("\n", "\r\n"),
        "text after the end": lambda: text + "}\n{",
        "twice": lambda: text + text,
        "100,000 brackets": lambda: "[" * 100_000,
        "50,000 objects": lambda: '{"a":' * 50_000,
        "a million blanks": lambda: " " * 10**6 + text,
        "random bytes": lambda: draw.randbytes(draw.choice((1, 16, 4096))),
        "a pickle": lambda: b"cposix\nsystem\n(S'touch executed'\ntR.",
    }
    name = draw.choice([*changes])
    spoiled = changes[name]()
    return (spoiled.encode("utf-8", "surrogatepass") if isinstance(spoiled, str) else spoiled), name
