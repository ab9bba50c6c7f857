"""Rotary positions of a model config: overrides, and the extension by model.context.

transformers 5 keeps their settings in rope_parameters, transformers 4 in rope_scaling and keys of
the config itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.assignments import did_you_mean
from harness.config.run_config import RunConfig
from harness.errors import ConfigError, shortened
from harness.layout.families import SIZE_KEYS, family_of, given_size
from harness.layout.tensor import keys_read

TABLE, SCALING = "rope_parameters", "rope_scaling"
_TYPE, _THETA, PARTIAL = "rope_type", "rope_theta", "partial_rotary_factor"
# Former places of a rotary table's keys, with their names in the table.
_OLD = {_THETA: _THETA, "rotary_emb_base": _THETA, PARTIAL: PARTIAL, "rotary_pct": PARTIAL}
ROTARY = {*_OLD, "rope_local_base_freq", SCALING, TABLE}
"""Keys of rotary settings in a config.json."""
INTO_TABLE = {_THETA, PARTIAL, SCALING}
"""Those whose override is moved into rope_parameters, if the config has it."""
# Type -> required keys, optional keys (modeling_rope_utils.py).
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (("factor",), ("attention_factor", "beta_fast", "beta_slow", "truncate")),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "proportional": ((), ("factor",)),
}
_OF_TYPES = {key for keys in _KEYS.values() for group in keys for key in group}
_OF_ALL = {_TYPE, "type", _THETA, PARTIAL, "original_max_position_embeddings"}
_INSTEAD = "set model.overrides.rope_parameters and model.overrides.max_position_embeddings instead"


def _tables(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [config[key] for key in (TABLE, SCALING) if config.get(key)]


def _by_layer(table: Mapping[str, Any]) -> list[str]:
    """Return the layer types that have a separate table of rotary settings."""
    return [key for key, value in table.items() if isinstance(value, Mapping)]


def _type_of(table: Mapping[str, Any]) -> Any:
    return table.get(_TYPE, table.get("type", "default"))


def extended(config: dict[str, Any], run: RunConfig) -> dict[str, Any]:
    """Return a model config with rotary positions extended as the run config says.

    Raises ConfigError for a model whose positions cannot be extended.
    """
    context, way = run.model.context, run.model.rope
    if context is None:
        if run.is_set("model.rope"):
            why = "model.rope has no effect without model.context"
            raise ConfigError(f"{why}: set model.context, too, or remove it")
        return config
    key, positions = positions_of(config)
    if why := _why_not(config):
        problem = f"but {why}"
    elif positions >= context:
        problem = f"but {run.model.name} has {positions} positions: remove it"
    elif way == "ntk" and not _theta(config):
        problem = (
            f"but {run.model.name} has no rope_theta to change: set model.overrides.rope_theta, too"
        )
    elif way == "ntk":
        return _with_theta({**config, key: context}, context / positions)
    else:
        name = TABLE if config.get(TABLE) else SCALING
        scaling = {_TYPE: way, "factor": context / positions}
        if way == "yarn":
            scaling["original_max_position_embeddings"] = positions
        return {**config, name: {**(config.get(name) or {}), **scaling}, key: context}
    raise ConfigError(f"model.context is {context} ({run.origin('model.context')}), {problem}")


def _theta(config: Mapping[str, Any]) -> float | None:
    """Return the base of a config's rotary frequencies; None if it has none."""
    bases = (table[_THETA] for table in (*_tables(config), config) if table.get(_THETA))
    return next(bases, None)


def _with_theta(config: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return a config that has, for texts of any length, the rotary frequencies of transformers'
    `dynamic` type (factor 1) for a text `factor` times as long as the trained positions.
    """
    theta, dim = _theta(config), _rotated(config)
    assert theta is not None, "checked before"
    scaled = {_THETA: theta * factor ** (dim / (dim - 2))}
    for key in (TABLE, SCALING):
        if config.get(key) and _THETA in config[key]:
            config = {**config, key: {**config[key], **scaled}}
    return config | scaled if _THETA in config else config


def _rotated(config: Mapping[str, Any]) -> int:
    """Return the number of rotated elements per head."""
    hidden, heads = given_size(config, "hidden") or 0, given_size(config, "heads") or 0
    head = config.get("qk_rope_head_dim") or config.get("head_dim") or hidden // heads
    names = (PARTIAL, "rotary_pct")
    shares = (t[name] for t in (*_tables(config), config) for name in names if name in t)
    return int(config.get("rotary_dim") or head * next(shares, 1.0))


def _why_not(config: Mapping[str, Any]) -> str:
    """Return why a model's positions cannot be extended; "" if they can."""
    kind = config["model_type"]
    family, tables = family_of(kind), _tables(config)
    has_others = family.learned_positions or family.alibi or config.get("alibi")
    is_rotary = bool(family.layers or tables or config.get(_THETA))
    if has_others or not is_rotary or not positions_of(config)[1]:
        return f"{kind} models have no known number of rotary positions"
    if any(map(_by_layer, tables)):
        return f"it has separate rotary settings for each type of layer: {_INSTEAD}"
    if scaled := rope_types(config) - {"default"}:
        names = ", ".join(sorted(map(str, scaled)))
        return f"its positions are already scaled ({names}): {_INSTEAD}"
    return ""


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """Return how a model's rotary positions are scaled: "default", "yarn", "longrope", ..."""
    tables = _tables(config)
    by_layer = [table[layer] for table in tables for layer in _by_layer(table)]
    return {_type_of(table) for table in (*tables, *by_layer)}


def or_longer(config: Mapping[str, Any], run: RunConfig, length: int) -> str:
    """Return how to give the model `length` positions, as the end of advice, or ""."""
    if run.model.context is not None or not _why_not(config):
        return f", or model.context={length}, to extend its positions"
    if family_of(config["model_type"]).learned_positions:
        return ""
    key, _ = positions_of(config)
    return f", or model.overrides.{key}={length}, to train positions that it has not seen"


def positions_of(config: Mapping[str, Any]) -> tuple[str, int]:
    """Return the key and the value of the number of positions; 0 if there is none."""
    keys = (key for key in SIZE_KEYS["positions"] if isinstance(config.get(key), int))
    return next(keys, SIZE_KEYS["positions"][0]), given_size(config, "positions") or 0


def override_named(key: str, run: RunConfig) -> str:
    """Return an override's key with its origin, for messages."""
    return f"model.overrides.{key} ({run.origin(f'model.overrides.{key}')})"


def rotary_problems(config: Mapping[str, Any], run: RunConfig) -> Iterator[str]:
    """Yield the problems of overridden rotary settings: those that their type needs but lacks, and
    those that it ignores.
    """
    overrides, tables = run.model.overrides, _tables(config)
    for name in (TABLE, SCALING):
        given, origin = overrides.get(name), run.origin(f"model.overrides.{name}")
        if not (isinstance(given, Mapping) and tables and isinstance(tables[0], Mapping)):
            continue
        for part in _by_layer(given) or [""]:
            own, whole = (given[part], tables[0].get(part)) if part else (given, tables[0])
            key = f"model.overrides.{name}{part and f'.{part}'}"
            if isinstance(whole, Mapping):
                yield from _of_table(own, whole, key, origin)
                if PARTIAL in own and PARTIAL not in (keys_read(config["model_type"]) or own):
                    why = f"{config['model_type']} models do not read it"
                    yield f"{key}.{PARTIAL} ({origin}) changes nothing: {why}"
    if _THETA in overrides and not isinstance(overrides[_THETA], int | float):
        value = shortened(overrides[_THETA])
        yield f"{override_named(_THETA, run)} is {value}: it must be a number"


def _of_table(
    given: Mapping[str, Any], table: Mapping[str, Any], key: str, origin: str
) -> Iterator[str]:
    """Yield the problems of one table, in which `given` is overridden."""
    kind = _type_of(table)
    if kind not in _KEYS:
        if {_TYPE, "type"} & given.keys():  # otherwise a type of the model itself
            near = did_you_mean(str(kind), _KEYS)
            problem = f"is {kind!r}, which is not one of {', '.join(_KEYS)}{near}"
            yield f"{key}.{_TYPE} ({origin}) {problem}"
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
            types = [each for each, keys in _KEYS.items() if name in (*keys[0], *keys[1])]
            able = [each for each in types if {*_KEYS[each][0]} <= table.keys()] or types
            yield (
                f"{key}.{name} ({origin}) changes nothing: the rotary type {kind} does not read "
                f"it: set {key}.{_TYPE} to {' or '.join(able)}, too"
            )
        elif name not in _OF_TYPES | _OF_ALL and near:
            yield f"{key}.{name} ({origin}) is not a rotary setting{near}"


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with overrides applied; tables merge key by key, "null" becomes None."""
    result = dict(config)
    for key, override in overrides.items():
        old, value = result.get(key), None if override == "null" else override
        both_tables = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both_tables else value  # type: ignore[arg-type]
    return result


def with_rotary(
    config: dict[str, Any], overrides: Mapping[str, Any], run: RunConfig
) -> dict[str, Any]:
    """Return a config with rotary settings overridden where its reader looks for them.

    transformers uses rope_parameters if present and then ignores the former keys; a non-empty
    rope_scaling replaces them all.
    """
    table = config.get(TABLE)
    if not overrides or not (isinstance(table, Mapping) and table):
        moves = TABLE in overrides and isinstance(config.get(SCALING), Mapping)
        result = merged(_moved(config) if moves else config, overrides)
        if isinstance(scaling := overrides.get(SCALING), Mapping):
            result[SCALING] = _rescaled(config.get(SCALING) or {}, scaling)
        return result
    config = {key: value for key, value in config.items() if key not in ROTARY - {TABLE}}
    for key, value in overrides.items():
        by_layer = _by_layer(table)
        if key != TABLE and (by_layer or key not in INTO_TABLE | {*_OLD}):
            raise ConfigError(
                f"{override_named(key, run)} is {shortened(value)}, but the model has one RoPE "
                f"table per layer type: set model.overrides.{'.'.join([TABLE, *by_layer[:1]])}"
            )
        if key == SCALING:
            table = _rescaled(table, value)
        elif key != TABLE:
            table = {**table, _OLD[key]: value}
        elif value is None:
            return {**config, TABLE: None}
        else:
            if by_layer and (lost := [name for name in value if name not in by_layer]):
                raise ConfigError(
                    f"{override_named(TABLE, run)} has {', '.join(lost)}, but the model has one "
                    f"RoPE table per layer type: set model.overrides.{TABLE}.{by_layer[0]}."
                    f"{lost[0]}"
                )
            table = merged(table, value)
    return {**config, TABLE: table}


def _moved(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with its former rotary keys moved into rope_parameters."""
    old = {new: config[key] for key, new in _OLD.items() if config.get(key) is not None}
    kept = {key: value for key, value in config.items() if key not in {*_OLD, SCALING}}
    return {**kept, TABLE: {**old, **config[SCALING]}}


def _rescaled(table: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return rotary settings with another scaling; theta and the rotated part stay."""
    kept = {key: value for key, value in table.items() if key in (_THETA, PARTIAL)}
    if scaling is None:
        return {**kept, _TYPE: "default"}
    before = table.get(_TYPE, table.get("type"))
    kind = scaling.get(_TYPE, scaling.get("type", before))
    same = {key: value for key, value in table.items() if key != "type"}
    named = {} if kind is None else {_TYPE: kind}  # the reader prefers this name
    return {**(same if kind == before else kept), **scaling, **named}
