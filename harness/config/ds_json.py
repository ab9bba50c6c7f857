"""The DeepSpeed JSON in the making: the user's values, their origins, and every change since."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from harness.config.assignments import COMMAND_LINE, assign, flat, listed
from harness.config.ds_keys import AUTO, literal, value_of
from harness.config.ds_names import use_first_names

Event = dict[str, Any]
_ABSENT = object()


class DsJson:
    """A DeepSpeed JSON that knows the origin of its values.

    It changes only through its methods, so that every changed value and every key left out is an
    event.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        name: str = "DeepSpeed JSON",
        assigned: Collection[str] = (),
    ) -> None:
        """`name`: the file; `assigned`: dotted keys that `ds.key=value` set over it."""
        self.given: dict[str, Any] = copy.deepcopy(dict(tree))
        self.name = name
        self.rejected: set[str] = set()
        """Keys removed because they are invalid: nobody chose the defaults in their place."""
        self._tree: dict[str, Any] = normalized(tree)
        self.problems = use_first_names(self._tree, name)
        """Keys that the JSON has under both of their names."""
        self._assigned = frozenset(assigned)
        self._changes: list[Event] = []
        self._left_out: dict[str, list[str]] = {}

    @property
    def tree(self) -> Mapping[str, Any]:
        """The JSON as it is now, to read."""
        return self._tree

    def literal(self, key: str) -> Any:
        """Return the value of a dotted key, None if it is absent, null or "auto"."""
        return literal(self._tree, key)

    def value(self, key: str) -> Any:
        """Return the literal, or DeepSpeed's default."""
        return value_of(self._tree, key)

    def is_auto(self, key: str) -> bool:
        """Return True if the JSON says "auto" for the key."""
        section, name = self._section_of(key)
        return section.get(name) == AUTO

    def look_up(self, key: str) -> tuple[object, str]:
        """Return the value of any key, as messages show it, and its origin."""
        section, name = self._section_of(key)
        if name in section and section[name] != AUTO:
            return section[name], self.origin(key)
        return self.value(key), self.origin(key)

    def origin(self, key: str) -> str:
        """Return the file, or "command line" if the key or a section around it was set there."""
        is_assigned = any(f"{key}.".startswith(f"{other}.") for other in self._assigned)
        return COMMAND_LINE if is_assigned else self.name

    def fill(self, key: str, value: Any, because: str = "") -> None:
        """Set a dotted key that the run config or the plan owns; each literal that this changes is
        an event, "auto" and absent keys are not.
        """
        self._put(key, value, because, dict(_literals(self._tree, key)))

    def set(self, key: str, value: Any, because: str) -> None:
        """Override the value that DeepSpeed would see for a dotted key, which is an event."""
        self._put(key, value, because, {key: self.value(key)})

    def remove(self, key: str, because: str) -> None:
        """Leave a key or section out; keys with the same reason share one note."""
        if self._delete(key):
            self._left_out.setdefault(because, []).append(key)

    def reject(self, key: str) -> None:
        """Remove an invalid key, so that the rest can still be checked."""
        self._delete(key)
        self.rejected.add(key)

    def drop(self, key: str) -> None:
        """Remove a key without an event: "auto", off, or adopted by the run config."""
        self._delete(key)

    @property
    def events(self) -> list[Event]:
        """Events of keys left out, then of values changed."""
        remarks = [
            {"kind": "left_out", "message": f"{listed(keys)} ({self.name}): {because}"}
            for because, keys in self._left_out.items()
        ]
        return [*remarks, *self._changes]

    def resolved(self) -> dict[str, Any]:
        """Return a copy of the JSON as it is now."""
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
        """Return the section that holds a dotted key, and its name there; an empty one if none."""
        section, name = self._tree, key
        while name not in section and "." in name:  # a name may itself have a dot in it
            first, _, name = name.partition(".")
            inner = section.get(first)
            section = inner if isinstance(inner, dict) else {}
        return section, name


def normalized(value: Any) -> Any:
    """Return a deep copy with whole numbers as integers: JSON files write bucket sizes as 5e8."""
    if isinstance(value, Mapping):
        return {key: normalized(item) for key, item in value.items()}
    if isinstance(value, list):
        return [normalized(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _literals(tree: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    """Return every literal under a dotted key, with its own dotted key."""
    value = literal(tree, key)
    pairs = flat(value, f"{key}.") if isinstance(value, Mapping) else [(key, value)]
    return [(name, item) for name, item in pairs if item not in (AUTO, None, {})]
