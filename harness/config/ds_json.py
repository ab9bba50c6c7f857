"""The DeepSpeed JSON: its file and command line, known keys, values, their origins, and changes.

ds_check.py changes keys without effect, old keys and values that DeepSpeed gets wrong. In plan/,
resolve_auto.py fills in most values, parallelism.py changes the keys of parallelism, and folder.py
those of monitors. Once the data is counted, plan/make.py resolves all of it again; engine/swap.py
changes the NVMe folder. foreign_config recognises configs of other programs.
"""

import copy
import functools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from harness.config.assignments import (
    COMMAND_LINE,
    MAX_FILE_BYTES,
    assign,
    assign_all,
    beyond_bounds,
    flat,
    listed,
)
from harness.errors import ConfigError, shortened
from harness.files.paths import DS_CONFIGS, not_found, shipped
from harness.files.regular_file import read_regular

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
        """A sentence for each key that the JSON has under two names."""
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
        """Return the section of a dotted key, empty if there is none, and the key's name in it."""
        section, name = self._tree, key
        while name not in section and "." in name:  # a name may itself contain a dot
            first, _, name = name.partition(".")
            inner = section.get(first)
            section = inner if isinstance(inner, dict) else {}
        return section, name


def normalized(value: Any) -> Any:
    """Return a deep copy with 5e8 as an integer, as files write sizes, and "Auto" as "auto"."""
    if isinstance(value, Mapping):
        return {key: normalized(item) for key, item in value.items()}
    if isinstance(value, list):
        return [normalized(item) for item in value]
    if isinstance(value, str) and value.lower() == AUTO:
        return AUTO
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _literals(tree: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    """Return every literal under a dotted key, with its full dotted key."""
    value = literal(tree, key)
    pairs = flat(value, f"{key}.") if isinstance(value, Mapping) else [(key, value)]
    return [(name, item) for name, item in pairs if item not in (AUTO, None, {})]


_FOREIGN_FILE = Path(__file__).with_name("foreign.toml")
_ENOUGH = 3
"""Number of a program's keys that identify its config; one or two may be a coincidence."""


@functools.cache
def _kinds() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_FOREIGN_FILE.read_text(encoding="utf-8"))


def foreign_config(path: object, keys: Iterable[str], wanted: str) -> str | None:
    """Return a problem if top-level `keys` are those of another kind of config than `wanted`."""
    plain = {key.replace("-", "_") for key in keys}
    kinds = _kinds()
    hits = {kind: len(plain & set(table["keys"].split())) for kind, table in kinds.items()}
    kind = max((kind for kind in hits if kind != wanted), key=lambda kind: hits[kind])
    if hits[kind] < max(_ENOUGH, hits[wanted] + 1):
        return None
    table = kinds[kind]
    problem = f"{path} is {table['name']}, not {kinds[wanted]['name']}"
    if option := table.get("option"):
        return f"{problem}: give it with {option}"
    places = [f"{key} is {place}" for key, place in table["here"].items() if key in plain]
    instead = "write its settings"
    if wanted == "deepspeed":
        instead = "give --deepspeed one of ds_configs/, and write the other settings"
    replacements = f" ({'; '.join(places)})" if places else ""
    return f"{problem}: {instead} as keys of the run config{replacements}"


def top_level_keys(text: str) -> list[str]:
    """Return the keys and TOML tables at line starts of a text that could not be parsed."""
    matches = re.findall(
        r"""^[ \t]{0,4}(?:\[([\w-]+)\]|["']?([A-Za-z_][\w-]*)["']?[ \t]*[:=])""", text, re.MULTILINE
    )
    return [table or key for table, key in matches]


PREFIX = "ds."
"""Prefix of the JSON's keys on the command line."""


def load_ds_json(path: Path, assignments: Iterable[str] = ()) -> tuple[DsJson, list[str]]:
    """Return the file's JSON with `key=value` applied, and all problems of both.

    A JSON that is not below the current folder may be one of ds_configs/.
    """
    path = shipped(path, DS_CONFIGS)
    problems: list[str] = []
    tree: dict[str, Any] = {}
    try:
        tree = read_ds_json(path)
        problems += use_first_names(tree, str(path))
    except ConfigError as error:
        problems += error.problems
    assigned, rejected = assign_all(tree, map(_with_first_name, assignments))
    problems += [f"{PREFIX}{problem}" for problem in rejected]
    return DsJson(tree, str(path), assigned), problems


def _with_first_name(assignment: str) -> str:
    """Return `key=value` under the key's canonical name, so that it overrides the file's."""
    key, equals, value = assignment.partition("=")
    return first_name(key.strip()) + equals + value


def read_ds_json(path: str | Path) -> dict[str, Any]:
    """Return the file as a dict. Raises ConfigError if it is missing, not JSON, not an object, has
    duplicate keys, exceeds the limits of a config, or is another program's config.
    """
    problems: list[str] = []

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                problems.append(f"{path} has {key} {times} times in one object: keep one of them")
        return dict(pairs)

    text = ""
    try:
        text = read_regular(Path(path), MAX_FILE_BYTES, links=True).decode().removeprefix("\ufeff")
        content = json.loads(
            text, object_pairs_hook=without_duplicates, parse_constant=_no_constant
        )
    except FileNotFoundError:
        raise ConfigError(not_found("DeepSpeed JSON", Path(path), DS_CONFIGS)) from None
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        problem = foreign_config(path, top_level_keys(text), "deepspeed")
        raise ConfigError(problem or f"{where} is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"DeepSpeed JSON {path} is nested too deeply to be read") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"DeepSpeed JSON {path} cannot be read: {error}") from None
    if problem := beyond_bounds(content):
        raise ConfigError(f"DeepSpeed JSON {path}: {problem}")
    if not isinstance(content, dict):
        problems.append(f"DeepSpeed JSON {path} holds {shortened(content)}, not an object {{...}}")
    elif problem := foreign_config(path, content, "deepspeed"):
        raise ConfigError(problem)
    if problems:
        raise ConfigError(problems)
    return dict(content)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a valid JSON number")
