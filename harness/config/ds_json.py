"""The DeepSpeed JSON being resolved: known keys, values, their origins, and changes.

It is changed by ds_file.py (`ds.key=value`, aliases), ds_check.py (keys without effect), and of
plan/ by resolve_auto.py (most values), parallelism.py and folder.py (monitors).
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from harness.config.assignments import COMMAND_LINE, assign, flat, listed

AUTO = "auto"
_KEYS_FILE = Path(__file__).with_name("ds_keys.json")


@functools.cache
def ds_keys() -> dict[str, Any]:
    """Return the table of known keys, {"keys": ...}, from tests/gates/generate_ds_keys.py."""
    table: dict[str, Any] = json.loads(_KEYS_FILE.read_text(encoding="utf-8"))
    return table


def literal(ds: Mapping[str, Any], key: str) -> Any:
    """Return the JSON's own value of a dotted key; None if it is absent, null or "auto"."""
    value: Any = ds
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value == AUTO else value


def value_of(ds: Mapping[str, Any], key: str) -> Any:
    """Return the value that DeepSpeed will use: the JSON's literal, or DeepSpeed's default.

    An absent section counts as one with all defaults. Raises KeyError for an unknown key.
    """
    node = ds_keys()
    for name in key.split("."):
        node = node["keys"][name]
    value = literal(ds, key)
    return node.get("default") if value is None else value


def default_of(key: str) -> Any:
    """Return DeepSpeed's default of a dotted key; None for a section or an unknown key."""
    node: Mapping[str, Any] = ds_keys()
    for name in key.split("."):
        node = node.get("keys", {}).get(name, {})
    return node.get("default")


def offloaded_to(ds: Mapping[str, Any], part: Literal["optimizer", "param"]) -> str:
    """Return the device that optimizer states or weights are offloaded to, or "none"."""
    return str(value_of(ds, f"zero_optimization.offload_{part}.device"))


def first_name(key: str) -> str:
    """Return a dotted key under its canonical name."""
    node, names = ds_keys(), []
    for name in key.split("."):
        first = node.get("keys", {}).get(name, {}).get("same_as", name)
        node = node.get("keys", {}).get(first, {})
        names.append(first)
    return ".".join(names)


def use_first_names(
    values: dict[str, Any], file: str, prefix: str = "", section: Mapping[str, Any] | None = None
) -> list[str]:
    """Rename every key of a JSON, or of its `section` after `prefix`, to its canonical name, in
    place. Return the problems of the `file`.
    """
    known, problems = (section or ds_keys())["keys"], []
    for name, value in list(values.items()):
        first = known.get(name, {}).get("same_as", name)
        node = known.get(first, {})
        if first != name:
            del values[name]
            if first in values:
                both = f"{prefix}{first} and {prefix}{name} ({file})"
                problems.append(f"{both} are the same key: keep one of them")
            values.setdefault(first, value)
        if "keys" in node and isinstance(value, dict):
            problems += use_first_names(value, file, f"{prefix}{first}.", node)
    return problems


Event = dict[str, Any]
_ABSENT = object()


class DsJson:
    """A DeepSpeed JSON that tracks the origin of its values.

    It changes only through its methods, so that every changed value and every key left out becomes
    an event.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        name: str = "DeepSpeed JSON",
        assigned: Mapping[str, Any] | None = None,
    ) -> None:
        """`name`: the file; `assigned`: dotted keys that `ds.key=value` has set in `tree`."""
        self.given: dict[str, Any] = copy.deepcopy(dict(tree))
        self.name = name
        self.rejected: set[str] = set()
        """Keys removed as invalid: their defaults are not the user's choice."""
        self._tree: dict[str, Any] = normalized(tree)
        self.problems = use_first_names(self._tree, name)
        """Keys that the JSON has under two names."""
        self.assigned = dict(assigned or {})
        self._changes: list[Event] = []
        self._left_out: dict[str, list[str]] = {}

    @property
    def tree(self) -> Mapping[str, Any]:
        """The current JSON, read-only."""
        return self._tree

    def literal(self, key: str) -> Any:
        """Return the value of a dotted key; None if it is absent, null or "auto"."""
        return literal(self._tree, key)

    def value(self, key: str) -> Any:
        """Return the literal, or else DeepSpeed's default."""
        return value_of(self._tree, key)

    def is_auto(self, key: str) -> bool:
        """Return True if the key is "auto" in the JSON."""
        section, name = self._section_of(key)
        return section.get(name) == AUTO

    def look_up(self, key: str) -> tuple[object, str]:
        """Return the value of a key, as messages show it, and its origin."""
        section, name = self._section_of(key)
        if name in section and section[name] != AUTO:
            return section[name], self.origin(key)
        return self.value(key), self.origin(key)

    def origin(self, key: str) -> str:
        """Return the file, or "command line" if the key or an enclosing section was set there."""
        is_assigned = any(f"{key}.".startswith(f"{other}.") for other in self.assigned)
        return COMMAND_LINE if is_assigned else self.name

    def fill(self, key: str, value: Any, because: str = "") -> None:
        """Set a dotted key that the run config or the plan determines. Each literal that this
        changes is an event; "auto" and absent keys are not.
        """
        self._put(key, value, because, dict(_literals(self._tree, key)))

    def set(self, key: str, value: Any, because: str) -> None:
        """Override the value that DeepSpeed would use for a dotted key, and record an event."""
        self._put(key, value, because, {key: self.value(key)})

    def remove(self, key: str, because: str) -> None:
        """Leave out a key or section, with a note; keys with the same reason share one."""
        if self._delete(key):
            self._left_out.setdefault(because, []).append(key)

    def reject(self, key: str) -> None:
        """Remove an invalid key so that the rest can still be checked."""
        self._delete(key)
        self.rejected.add(key)

    def drop(self, key: str) -> None:
        """Remove a key without an event: it is "auto", off, or taken over by the run config."""
        self._delete(key)

    @property
    def events(self) -> list[Event]:
        """Events for keys left out, then for changed values."""
        remarks = [
            {"kind": "left_out", "message": f"{listed(keys)} ({self.name}): {because}"}
            for because, keys in self._left_out.items()
        ]
        return [*remarks, *self._changes]

    def resolved(self) -> dict[str, Any]:
        """Return a copy of the current JSON."""
        return copy.deepcopy(self._tree)

    def _put(self, key: str, value: Any, because: str, before: Mapping[str, Any]) -> None:
        assign(self._tree, key, value)
        after = dict(_literals(self._tree, key))
        for name, old in before.items():
            if (new := after.get(name)) != old:
                now = "left out" if new is None else repr(new)
                message = f"{name} is {now}, not {old!r} ({self.origin(name)}): {because}"
                event = {"kind": "changed", "json_key": name, "was": old, "value": new}
                self._changes.append({**event, "message": message})

    def _delete(self, key: str) -> bool:
        section, name = self._section_of(key)
        return section.pop(name, _ABSENT) is not _ABSENT

    def _section_of(self, key: str) -> tuple[dict[str, Any], str]:
        """Return the section with a dotted key, and its name there; an empty section if none."""
        section, name = self._tree, key
        while name not in section and "." in name:  # a name may itself contain a dot
            first, _, name = name.partition(".")
            inner = section.get(first)
            section = inner if isinstance(inner, dict) else {}
        return section, name


def normalized(value: Any) -> Any:
    """Return a deep copy with whole floats as integers: JSON files write bucket sizes as 5e8."""
    if isinstance(value, Mapping):
        return {key: normalized(item) for key, item in value.items()}
    if isinstance(value, list):
        return [normalized(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _literals(tree: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    """Return every literal under a dotted key, with its full dotted key."""
    value = literal(tree, key)
    pairs = flat(value, f"{key}.") if isinstance(value, Mapping) else [(key, value)]
    return [(name, item) for name, item in pairs if item not in (AUTO, None, {})]
