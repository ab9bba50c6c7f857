"""The DeepSpeed JSON: reading it, its values, and the rules of what is refused or changed."""

from __future__ import annotations

import functools
import json
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.config.assignments import COMMAND_LINE, assign
from harness.config.bounds import MAX_FILE_BYTES, beyond_bounds, shortened
from harness.config.foreign import foreign_config, top_level_keys
from harness.errors import ConfigError
from harness.files.regular_file import read_regular

AUTO = "auto"
_KEYS_FILE = Path(__file__).with_name("ds_keys.json")
_REFUSED_FILE = Path(__file__).with_name("ds_refused.toml")


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
    """The table of tools/proofs/generate_ds_keys.py: {"keys": ...} of sections and keys."""
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
    """The file as a dict. Raises ConfigError: missing, not JSON, not an object, duplicate keys,
    beyond the bounds of a config, another program's config.
    """
    problems: list[str] = []

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                problems.append(f"{path} has {key} {times} times in one object: keep one of them")
        return dict(pairs)

    text = ""
    try:
        text = read_regular(Path(path), MAX_FILE_BYTES, links=True).decode()
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
        problem = foreign_config(path, top_level_keys(text), "deepspeed")
        raise ConfigError(problem or f"{where} is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"DeepSpeed JSON {path} is nested too deep to be read") from None
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
    raise ValueError(f"{name} is not a number that JSON has")


def normalized(value: Any) -> Any:
    """A deep copy with whole numbers as integers: JSON files write bucket sizes as 5e8."""
    if isinstance(value, Mapping):
        return {key: normalized(item) for key, item in value.items()}
    if isinstance(value, list):
        return [normalized(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def changes(
    ds: dict[str, Any],
    source: Source,
    accelerator: str = "cuda",
    wrong_keys: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Write what rules put in the place of a value, in place; returns an event for each."""
    events = []
    for rule in refused():
        if "instead" in rule and _applies(rule, ds, accelerator, wrong_keys):
            key, value = rule["key"], value_of(ds, rule["key"])
            assign(ds, key, rule["instead"])
            message = f"{key} is {rule['instead']!r}, not {value!r} ({source.of(key)}): "
            events.append({"kind": "changed", "json_key": key, "message": message + rule["why"]})
    return events


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
        if "instead" not in rule and _applies(rule, ds, accelerator, wrong_keys):
            key = rule["key"]
            value = literal(ds, key)
            shown = value_of(ds, key) if value is None else value
            problem = f"{key} is {shown!r} ({source.of(key)}): {rule['why']}"
            problems.append((problem, rule.get("estimated", False)))
    return problems


def _applies(
    rule: Mapping[str, Any], ds: Mapping[str, Any], accelerator: str, wrong_keys: Collection[str]
) -> bool:
    """Whether a rule's conditions hold, none of them about a key that was removed."""
    wanted, unless = rule.get("when", {}), rule.get("unless", {})
    return (
        rule.get("on", accelerator) == accelerator
        and not wanted.keys() & wrong_keys
        and all(_is_among(ds, key, values) for key, values in wanted.items())
        and not any(_is_among(ds, key, values) for key, values in unless.items())
    )


def _is_among(ds: Mapping[str, Any], key: str, values: list[Any]) -> bool:
    value = value_of(ds, key)
    return ("null" if value is None else value) in values
