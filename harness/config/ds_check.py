"""Checks of a DeepSpeed JSON: the keys that DeepSpeed knows, and the rules of ds_refused.toml.

DeepSpeed itself ignores unknown keys at most levels; here they are errors. Aliases of a key are
accepted. Comments, keys that DeepSpeed has removed and that are off, and keys that never had an
effect are left out with a note. plan/merge_settings.py checks optimizer.params and
scheduler.params.
"""

import functools
import math
import operator
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.config.assignments import COMMAND_LINE, NAMED_AT_ONCE, did_you_mean, flat, listed
from harness.config.ds_json import AUTO, DsJson, default_of, ds_keys
from harness.errors import Problems, worded

_FILE = Path(__file__).with_name("ds_refused.toml")
_COMMENTS = ("_", "//", "#")
"""Prefixes of keys that serve as comments, for which JSON has no syntax."""

Rule = Mapping[str, Any]


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def rules() -> list[Rule]:
    """Return the rules; the file documents their fields."""
    table: list[Rule] = _tables()["rule"]
    return table


def apply_changes(ds: DsJson, accelerator: str = "cuda") -> None:
    """Apply every rule that changes a value or leaves keys out."""
    for rule in rules():
        if "left_out" in rule and _applies(rule, ds, accelerator):
            for key in rule["left_out"]:
                if ds.literal(key) not in (None, default_of(key)):
                    ds.remove(key, rule["why"])
        if "instead" in rule and _applies(rule, ds, accelerator):
            ds.set(rule["key"], rule["instead"], rule["why"])


def refusals(ds: DsJson, accelerator: str = "cuda") -> Iterator[Rule]:
    """Yield the rules that reject a JSON whose keys are known and whose precision is decided."""
    for rule in rules():
        if not rule.keys() & {"instead", "left_out"} and _applies(rule, ds, accelerator):
            yield rule


def _applies(rule: Rule, ds: DsJson, accelerator: str) -> bool:
    """Return True if a rule's conditions hold and none concerns a rejected key."""
    required, unless = rule.get("when", {}), rule.get("unless", {})
    return (
        rule.get("on", accelerator) == accelerator
        and not required.keys() & ds.rejected
        and all(_is_among(ds, key, values) for key, values in required.items())
        and not any(_is_among(ds, key, values) for key, values in unless.items())
    )


def _is_among(ds: DsJson, key: str, values: list[Any]) -> bool:
    value = ds.value(key)
    return ("null" if value is None else value) in values


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


def check_keys(ds: DsJson, problems: Problems) -> None:
    """Remove, in place, every unknown or ill-typed key at any level; replace deprecated keys."""
    problems.say(*ds.problems)
    unlike_any: list[str] = []
    _check_section(ds, ds.tree, ds_keys(), "", problems, unlike_any)
    where = f"({ds.name})"
    if len(unlike_any) > NAMED_AT_ONCE:
        keys = f"DeepSpeed does not know {len(unlike_any)} keys {where}: {listed(unlike_any)}"
        problems.say(keys)
    else:
        problems.say(*(f"{key} {where} is not a key that DeepSpeed knows" for key in unlike_any))


def _check_section(
    ds: DsJson,
    values: Mapping[str, Any],
    section: Mapping[str, Any],
    prefix: str,
    problems: Problems,
    unlike_any: list[str],
) -> None:
    """Check one section; `unlike_any` receives unknown keys that resemble no known key."""
    for name, value in list(values.items()):
        key, node = prefix + name, section["keys"].get(name)
        if name.startswith(_COMMENTS):
            ds.remove(key, "a comment")
        elif key in _ignored():
            ds.remove(key, f"left out, {_ignored()[key]}")
        elif node is None:
            if not section.get("free"):
                _reject_unknown(ds, key, section["keys"], problems, unlike_any)
        elif "removed" in node:
            _drop_removed(ds, key, value, node["removed"], problems)
        elif must_be := _must_be(value, node):
            problems.say(worded(key, value, ds.origin(key), f"it must be {must_be}"))
            ds.reject(key)
        elif "replaced_by" in node and value is not None:
            _replace(ds, key, value, node, problems)
        elif "keys" in node and value is not None:
            _check_section(ds, value, node, f"{key}.", problems, unlike_any)


def _reject_unknown(
    ds: DsJson, key: str, siblings: Mapping[str, Any], problems: Problems, unlike_any: list[str]
) -> None:
    origin, hint = ds.origin(key), advice(key)
    prefix, _, name = key.rpartition(".")
    if not hint:
        current = [
            other for other, node in siblings.items() if not node.keys() & {"removed", "same_as"}
        ]
        elsewhere = [other for other in _all_keys() if other.endswith("." + name)]
        if 1 <= len(elsewhere) <= 2:
            hint = f"; did you mean {' or '.join(elsewhere)}?"
        else:
            hint = did_you_mean(key, [f"{prefix}.{other}".lstrip(".") for other in current])
    ds.reject(key)
    if hint or origin == COMMAND_LINE:
        problems.say(f"{key} ({origin}) is not a key that DeepSpeed knows{hint}")
    else:
        unlike_any.append(key)


def _drop_removed(ds: DsJson, key: str, value: Any, message: str, problems: Problems) -> None:
    if _is_off(value):
        ds.remove(key, "left out, DeepSpeed has removed it, and it is off")
    else:
        problems.say(f"{key} ({ds.origin(key)}): {message} Remove it{advice(key)}")
        ds.reject(key)


def _is_off(value: Any) -> bool:
    """Return True if a section that DeepSpeed has removed had no effect."""
    if not isinstance(value, Mapping) or not value:
        return value in (None, False, AUTO, {})
    switches = [inner for key, inner in flat(value) if key.rpartition(".")[2] == "enabled"]
    return bool(switches) and all(switch in (False, AUTO) for switch in switches)


def _replace(ds: DsJson, key: str, value: Any, node: Mapping[str, Any], problems: Problems) -> None:
    """Replace a deprecated key by its successor in DeepSpeed."""
    new = key.removesuffix(key.rpartition(".")[2]) + node["replaced_by"]
    if "becomes" not in node:
        ds.remove(key, f"left out, an old key: see {new}")
    elif ds.literal(new) is not None or ds.is_auto(new):
        problems.say(
            f"{key} ({ds.origin(key)}) is an old key for {new}, which is also set: remove it"
        )
        ds.reject(key)
    elif value and value != AUTO:
        shown = str(node["becomes"]).replace("'", '"').replace("True", "true")
        ds.remove(key, f'an old key, read as "{node["replaced_by"]}": {shown}')
        ds.fill(new, node["becomes"])
    else:
        ds.drop(key)


def _must_be(value: Any, node: Mapping[str, Any]) -> str | None:
    """Return the requirement that a known key's value violates; None if it is fine."""
    if "keys" in node:
        is_section = isinstance(value, dict) or (value is None and node.get("nullable"))
        return None if is_section else "an object {...}"
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
def _ignored() -> dict[str, str]:
    """Return, by key, the reason for leaving it out."""
    return {key: why for why, keys in _tables()["ignored"].items() for key in keys}


def advice(key: str) -> str:
    """Return the replacement for a key, to end a sentence."""
    text = _tables()["advice"].get(key)
    return f": {text}" if text else ""


@functools.cache
def _all_keys() -> tuple[str, ...]:
    """Return every dotted key that DeepSpeed knows, including sections."""

    def keys(section: Mapping[str, Any], prefix: str) -> list[str]:
        dotted = []
        for name, node in section.get("keys", {}).items():
            if not node.keys() & {"removed", "same_as", "replaced_by"}:
                dotted += [prefix + name, *keys(node, f"{prefix}{name}.")]
        return dotted

    return tuple(keys(ds_keys(), ""))
