"""The DeepSpeed JSON: reading it, and checking each of its keys against what DeepSpeed knows.

Unlike DeepSpeed itself, which drops what it does not understand at most levels, an unknown key is
an error here.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.assignments import COMMAND_LINE, did_you_mean
from harness.errors import ConfigError

AUTO = "auto"
_KEYS_FILE = Path(__file__).with_name("ds_keys.json")
_REFUSED_FILE = Path(__file__).with_name("ds_refused.toml")

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


@dataclass(frozen=True)
class Source:
    """Where the JSON's values came from, for messages."""

    name: str
    """The file, as people say it."""
    assigned: frozenset[str] = frozenset()
    """Dotted keys that `ds.key=value` set over it."""

    def of(self, key: str) -> str:
        """The file, or "command line" for a dotted key that was set, or lies in one that was."""
        set_there = any(f"{key}.".startswith(f"{given}.") for given in self.assigned)
        return COMMAND_LINE if set_there else self.name


@functools.cache
def ds_keys() -> dict[str, Any]:
    """The table of tools/generate_ds_keys.py: a section {"keys": ...} of sections and keys."""
    table: dict[str, Any] = json.loads(_KEYS_FILE.read_text(encoding="utf-8"))
    return table


@functools.cache
def refused() -> list[dict[str, Any]]:
    """The rules of ds_refused.toml, which says what they mean."""
    rules: list[dict[str, Any]] = tomllib.loads(_REFUSED_FILE.read_text(encoding="utf-8"))["rule"]
    return rules


def value_of(ds: Mapping[str, Any], key: str) -> Any:
    """What DeepSpeed will see under a dotted key: the JSON's literal, or its own default.

    A section that is absent counts as one with all defaults.
    """
    node = ds_keys()
    for name in key.split("."):
        node = node["keys"][name]
    value = literal(ds, key)
    return node.get("default") if value is None else value


def offloaded_to(ds: Mapping[str, Any], what: Literal["optimizer", "param"]) -> str:
    """The device that ZeRO keeps the optimizer's states or the weights on; "none" for its own."""
    return str(value_of(ds, f"zero_optimization.offload_{what}.device"))


def literal(ds: Mapping[str, Any], key: str) -> Any:
    """The JSON's own value under a dotted key, None where it is absent, null or "auto"."""
    value: Any = ds
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value == AUTO else value


def read_ds_json(path: str | Path) -> dict[str, Any]:
    """The file as a dict. Raises ConfigError: missing, not JSON, not an object, duplicate keys."""
    problems: list[str] = []

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                problems.append(f"{path} has {key} {times} times in one object: keep one of them")
        return dict(pairs)

    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(
            text, object_pairs_hook=without_duplicates, parse_constant=_no_constant
        )
    except FileNotFoundError:
        raise ConfigError(
            f"there is no DeepSpeed JSON {path}: give --deepspeed an existing file, such as one "
            f"of ds_configs/"
        ) from None
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise ConfigError(f"{where} is not valid JSON: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"DeepSpeed JSON {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        problems.append(f"DeepSpeed JSON {path} holds {content!r}, not an object {{...}}")
    if problems:
        raise ConfigError(problems)
    return dict(content)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON has")


def normalized(value: Any) -> Any:
    """A deep copy with whole numbers as integers: JSON files write bucket sizes as 5e8."""
    if isinstance(value, Mapping):
        return {key: normalized(item) for key, item in value.items()}
    if isinstance(value, list):
        return [normalized(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def take_wrong_keys(ds: dict[str, Any], source: Source) -> list[str]:
    """Remove every unknown or ill-typed key, at any level, in place; returns what is wrong.

    What is left can be checked all the same.
    """
    return list(_take_wrong(ds, ds_keys(), "", source))


def _take_wrong(
    values: dict[str, Any], section: Mapping[str, Any], prefix: str, source: Source
) -> Iterator[str]:
    known = section["keys"]
    for name, value in list(values.items()):
        key = prefix + name
        where = source.of(key)
        wrong = None
        if name not in known:
            if not section.get("free"):
                hint = did_you_mean(key, [prefix + other for other in known])
                wrong = f"{key} ({where}) is not a key that DeepSpeed knows{hint}"
        elif modern := known[name].get("same_as") or known[name].get("replaced_by"):
            wrong = f"{key} ({where}) is an old name: use {prefix}{modern}"
        elif "keys" in known[name] and isinstance(value, dict):
            yield from _take_wrong(value, known[name], f"{key}.", source)
        elif must_be := _must_be(value, known[name]):
            wrong = f"{key} is {value!r} ({where}): it must be {must_be}"
        if wrong:
            del values[name]
            yield wrong


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


def refusals(
    ds: Mapping[str, Any],
    source: Source,
    accelerator: str = "cuda",
    wrong_keys: Collection[str] = (),
) -> list[tuple[str, bool]]:
    """What is understood but refused, of a JSON whose keys are known and precision is decided; of
    each whether its memory can be estimated all the same.

    `wrong_keys` were removed from it: their default says nothing of what was meant.
    """
    problems = []
    for rule in refused():
        if rule.get("on", accelerator) != accelerator:
            continue
        wanted, unless = rule.get("when", {}), rule.get("unless", {})
        if (
            not wanted.keys() & wrong_keys
            and all(_is_among(ds, key, values) for key, values in wanted.items())
            and not any(_is_among(ds, key, values) for key, values in unless.items())
        ):
            key = rule["key"]
            value = literal(ds, key)
            given = value_of(ds, key) if value is None else value
            problem = f"{key} is {given!r} ({source.of(key)}): {rule['why']}"
            problems.append((problem, rule.get("estimated", False)))
    return problems


def _is_among(ds: Mapping[str, Any], key: str, values: list[Any]) -> bool:
    value = value_of(ds, key)
    return ("null" if value is None else value) in values
