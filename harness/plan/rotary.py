"""Rotary settings that `model.overrides` leave: keys of each type, as transformers reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.assignments import did_you_mean
from harness.config.run_config import RunConfig
from harness.errors import shortened
from harness.layout.plans import keys_read

_TABLES = ("rope_parameters", "rope_scaling")
_TYPE, _THETA, _PARTIAL = "rope_type", "rope_theta", "partial_rotary_factor"
# Type -> the keys that it needs, and those that it may have (modeling_rope_utils.py).
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (("factor",), ("attention_factor", "beta_fast", "beta_slow", "truncate")),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "proportional": ((), ("factor",)),
}
_OF_TYPES = {key for keys in _KEYS.values() for of in keys for key in of}
_OF_ALL = {_TYPE, "type", _THETA, _PARTIAL, "original_max_position_embeddings"}


def rotary_problems(config: Mapping[str, Any], run: RunConfig) -> Iterator[str]:
    """Yield the problems of rotary settings that are overridden: what their type lacks, what it
    does not read.
    """
    overrides = run.model.overrides
    for name in _TABLES:
        given = overrides.get(name)
        table = config.get("rope_parameters") or config.get("rope_scaling")
        if not (isinstance(given, Mapping) and isinstance(table, Mapping)):
            continue
        parts = [key for key, value in given.items() if isinstance(value, Mapping)]
        for part in parts or [""]:
            own, whole = (given[part], table.get(part)) if part else (given, table)
            key = f"model.overrides.{name}{part and f'.{part}'}"
            if isinstance(whole, Mapping):
                origin = run.origin(f"model.overrides.{name}")
                yield from _of_table(own, whole, key, origin)
                if _PARTIAL in own and _PARTIAL not in (keys_read(config["model_type"]) or own):
                    why = f"{config['model_type']} models do not read it"
                    yield f"{key}.{_PARTIAL} ({origin}) changes nothing: {why}"
    if _THETA in overrides and not isinstance(overrides[_THETA], int | float):
        origin = run.origin(f"model.overrides.{_THETA}")
        value = shortened(overrides[_THETA])
        yield f"model.overrides.{_THETA} ({origin}) is {value}: it must be a number"


def _of_table(
    given: Mapping[str, Any], table: Mapping[str, Any], key: str, origin: str
) -> Iterator[str]:
    """Yield the problems of one table, of which `given` is overridden."""
    kind = table.get(_TYPE, table.get("type", "default"))
    if kind not in _KEYS:
        if {_TYPE, "type"} & given.keys():  # else it is one of the model's own
            near = did_you_mean(str(kind), _KEYS)
            yield f"{key}.{_TYPE} ({origin}) is {kind!r}, none of {', '.join(_KEYS)}{near}"
        return
    needed, more = _KEYS[kind]
    if missing := [name for name in needed if table.get(name) is None]:
        settings = " and ".join(f"{key}.{name}" for name in missing)
        yield f"{key} ({origin}) makes the rotary type {kind}: set {settings}, too"
    if _THETA in given and not isinstance(given[_THETA], int | float):
        yield f"{key}.{_THETA} ({origin}) is {shortened(given[_THETA])}: it must be a number"
    for name in given:
        near = did_you_mean(name, _OF_TYPES | _OF_ALL)
        if name in _OF_TYPES and name not in (*needed, *more):
            types = [of for of, keys in _KEYS.items() if name in (*keys[0], *keys[1])]
            able = [of for of in types if {*_KEYS[of][0]} <= table.keys()] or types
            yield (
                f"{key}.{name} ({origin}) changes nothing: the rotary type {kind} does not read "
                f"it: set {key}.{_TYPE} to {' or '.join(able)}, too"
            )
        elif name not in _OF_TYPES | _OF_ALL and near:
            yield f"{key}.{name} ({origin}) is no rotary setting{near}"
