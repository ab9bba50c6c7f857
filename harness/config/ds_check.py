"""The keys of a DeepSpeed JSON, checked at every level against those that DeepSpeed knows.

Unlike DeepSpeed itself, which drops what it does not understand at most levels, an unknown key is
an error here. Other names of a key are taken as what they are; comments, sections that DeepSpeed
has removed but that are switched off, and keys that never did anything are left out with a note.
"""

from __future__ import annotations

import functools
import math
import operator
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.assignments import COMMAND_LINE, NAMED_AT_ONCE, did_you_mean, flat, listed
from harness.config.bounds import shortened
from harness.config.ds_json import AUTO, Source, ds_keys

Event = dict[str, Any]

_LEFTOVERS_FILE = Path(__file__).with_name("ds_leftovers.toml")
_COMMENTS = ("_", "//", "#")
"""How keys begin that are remarks: JSON has no other place for them."""

_PYTHON_TYPES: dict[str, Any] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": Mapping,
    "string": str,
}
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "maximum": ("at most", operator.le),
}


@dataclass
class KeyCheck:
    """What a check of the keys came to. The JSON holds no key of `wrong_keys` any more."""

    source: Source
    problems: list[str] = field(default_factory=list)
    wrong_keys: set[str] = field(default_factory=set)
    comments: list[str] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> the keys that were left out, or read as another, for it."""
    unknown: list[str] = field(default_factory=list)
    """Keys like none that DeepSpeed knows."""

    def reject(self, key: str, problem: str) -> None:
        """Note what is wrong with a key."""
        self.problems.append(problem)
        self.wrong_keys.add(key)

    def leave_out(self, key: str, why: str) -> None:
        """Note a key that is left out, or read as another."""
        self.notes.setdefault(why, []).append(key)

    def events(self) -> list[Event]:
        """A note for each reason to leave something out."""
        reasons = dict(self.notes)
        if self.comments:
            reasons["a comment"] = self.comments
        return [
            {"kind": "left_out", "message": f"{listed(keys)} ({self.source.name}): {why}"}
            for why, keys in reasons.items()
        ]


def check_keys(ds: dict[str, Any], source: Source) -> KeyCheck:
    """Remove every unknown or ill-typed key, at any level, and give the others their first name, in
    place. What is left can be checked all the same.
    """
    check = KeyCheck(source, own_names(ds, source))
    _check_section(ds, ds_keys(), "", check)
    where = f"({source.name})"
    if len(check.unknown) <= NAMED_AT_ONCE:
        sentences = [f"{key} {where} is not a key that DeepSpeed knows" for key in check.unknown]
    else:
        sentences = [
            f"{len(check.unknown)} keys {where} are none that DeepSpeed knows: "
            f"{listed(check.unknown)}"
        ]
    check.problems += sentences
    return check


def own_names(ds: dict[str, Any], source: Source) -> list[str]:
    """Give every key that has two names its own one, in place; returns what is wrong."""
    return list(_use_own_names(ds, ds_keys(), "", source))


def own_key(key: str) -> str:
    """The own name of a dotted key, which may have another one."""
    node, names = ds_keys(), []
    for name in key.split("."):
        own = node.get("keys", {}).get(name, {}).get("same_as", name)
        node = node.get("keys", {}).get(own, {})
        names.append(own)
    return ".".join(names)


def _use_own_names(
    values: dict[str, Any], section: Mapping[str, Any], prefix: str, source: Source
) -> Iterator[str]:
    for name, value in list(values.items()):
        own = section["keys"].get(name, {}).get("same_as", name)
        node = section["keys"].get(own, {})
        if own != name:
            del values[name]
            if own in values:
                where = source.of(prefix + own)
                yield f"{prefix}{own} and {prefix}{name} ({where}) are one key: keep one of them"
            values.setdefault(own, value)
        if "keys" in node and isinstance(value, dict):
            yield from _use_own_names(value, node, f"{prefix}{own}.", source)


def _check_section(
    values: dict[str, Any], section: Mapping[str, Any], prefix: str, check: KeyCheck
) -> None:
    known = section["keys"]
    for name, value in list(values.items()):
        key, node = prefix + name, known.get(name)
        if name.startswith(_COMMENTS):
            check.comments.append(key)
            del values[name]
        elif key in _ignored():
            check.leave_out(key, f"left out, {_ignored()[key]}")
            del values[name]
        elif node is None:
            if not section.get("free"):
                del values[name]
                _unknown(key, known, prefix, check)
        elif "removed" in node:
            del values[name]
            _removed(key, value, node["removed"], check)
        elif "replaced_by" in node and value is not None:
            del values[name]
            _replace(values, key, value, node, prefix, check)
        elif "keys" in node and isinstance(value, dict):
            _check_section(value, node, f"{key}.", check)
        elif must_be := _must_be(value, node):
            del values[name]
            where = check.source.of(key)
            check.reject(key, f"{key} is {shortened(value)} ({where}): it must be {must_be}")


def _unknown(key: str, known: Mapping[str, Any], prefix: str, check: KeyCheck) -> None:
    where = check.source.of(key)
    hint = _advice(key)
    if not hint:
        current = [name for name, node in known.items() if not node.keys() & {"removed", "same_as"}]
        elsewhere = [other for other in _all_keys() if other.endswith("." + key.rpartition(".")[2])]
        if 1 <= len(elsewhere) <= 2:
            hint = f"; did you mean {' or '.join(elsewhere)}?"
        else:
            hint = did_you_mean(key, [prefix + name for name in current])
    check.wrong_keys.add(key)
    if hint or where == COMMAND_LINE:
        check.problems.append(f"{key} ({where}) is not a key that DeepSpeed knows{hint}")
    else:
        check.unknown.append(key)


def _removed(key: str, value: Any, message: str, check: KeyCheck) -> None:
    if _is_off(value):
        check.leave_out(key, "left out, DeepSpeed has removed it, and it is off")
    else:
        where = check.source.of(key)
        check.reject(key, f"{key} ({where}): {message} Remove it{_advice(key)}")


def _is_off(value: Any) -> bool:
    """Whether a section that DeepSpeed has removed asked for nothing."""
    if not isinstance(value, Mapping) or not value:
        return value in (None, False, AUTO, {})
    switches = [inner for key, inner in flat(value) if key.rpartition(".")[2] == "enabled"]
    return bool(switches) and all(switch in (False, AUTO) for switch in switches)


def _replace(
    values: dict[str, Any],
    key: str,
    value: Any,
    node: Mapping[str, Any],
    prefix: str,
    check: KeyCheck,
) -> None:
    """Write what DeepSpeed makes of a deprecated key in the place of it."""
    new, where = node["replaced_by"], check.source.of(key)
    if must_be := _must_be(value, node):
        check.reject(key, f"{key} is {shortened(value)} ({where}): it must be {must_be}")
    elif "becomes" not in node:
        check.leave_out(key, f"left out, an old key: see {prefix}{new}")
    elif new in values and values[new] is not None:
        problem = f"{key} ({where}) is an old key for {prefix}{new}, which is there too: remove it"
        check.reject(key, problem)
    elif value and value != AUTO:
        values[new] = node["becomes"]
        shown = str(node["becomes"]).replace("'", '"').replace("True", "true")
        check.leave_out(key, f'an old key, read as "{new}": {shown}')


def _must_be(value: Any, node: Mapping[str, Any]) -> str | None:
    """What the value of a known key must be instead, None where it is fine."""
    if "keys" in node:
        return None if value is None and node.get("nullable") else "an object {...}"
    if value == AUTO:
        return None
    if not any(_is_a(kind, value) for kind in node["type"]):
        return " or ".join(node["type"])
    if "choices" in node and value is not None and value not in node["choices"]:
        return "one of " + ", ".join(map(repr, node["choices"]))
    if _is_a("number", value):
        if not math.isfinite(value):
            return "a finite number"
        for bound, (words, holds) in _BOUNDS.items():
            if bound in node and not holds(value, node[bound]):
                return f"{words} {node[bound]}"
    return None


def _is_a(kind: str, value: Any) -> bool:
    return isinstance(value, _PYTHON_TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")


@functools.cache
def _leftovers() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_LEFTOVERS_FILE.read_text(encoding="utf-8"))


@functools.cache
def _ignored() -> dict[str, str]:
    """Key -> why it is left out."""
    return {key: why for why, keys in _leftovers()["ignored"].items() for key in keys}


def _advice(key: str) -> str:
    """What to write in the place of a key, as the end of a sentence."""
    advice = _leftovers()["advice"].get(key)
    return f": {advice}" if advice else ""


@functools.cache
def _all_keys() -> tuple[str, ...]:
    """Every dotted key that DeepSpeed knows, sections too."""

    def keys(section: Mapping[str, Any], prefix: str) -> list[str]:
        found = []
        for name, node in section.get("keys", {}).items():
            if not node.keys() & {"removed", "same_as", "replaced_by"}:
                found += [prefix + name, *keys(node, f"{prefix}{name}.")]
        return found

    return tuple(keys(ds_keys(), ""))
