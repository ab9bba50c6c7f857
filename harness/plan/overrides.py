"""`model.overrides`: keys of a config.json that a run changes, including rotary settings.

An override that would have no effect on the model is rejected, with advice. In a run that is
continued it stays: earlier versions accepted it, and a run keeps what it was trained with.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.config.assignments import did_you_mean
from harness.config.run_config import RunConfig
from harness.errors import ConfigError, shortened
from harness.layout.families import SIZE_KEYS, family_of
from harness.layout.shape import Shape
from harness.layout.state_size import CELL_STATES
from harness.layout.tensor import every_key, keys_read

_TYPES = tomllib.loads(Path(__file__).with_name("model_keys.toml").read_text(encoding="utf-8"))[
    "types"
]
DROPOUT_ENDINGS = ("dropout", "pdrop", "dropout_prob")
_MOST = {"layers": 2_000, "experts": 100_000}
"""Maximum counts, because a plan iterates over layers and experts."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_IS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "number": ("a number", _number),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a name, in quotes", lambda value: isinstance(value, str)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "table": ("a table", lambda value: isinstance(value, Mapping)),
}


def value_problems(config: Mapping[str, Any], run_config: RunConfig, source: str) -> Iterator[str]:
    """Yield the problems of a config's values after overrides; null is always valid."""
    for key, value in config.items():
        must_be = None if value is None else _must_be(key, value, config)
        if must_be:
            place = f"{key} ({source})"
            if key in run_config.model.overrides:
                origin = run_config.origin(f"model.overrides.{key}")
                place = f"model.overrides.{key} ({origin})"
            yield f"{place} is {shortened(value)}: it must be {must_be}"


def _must_be(key: str, value: Any, config: Mapping[str, Any]) -> str | None:
    """Return the valid values of a key; None if its value is valid or the key is unknown."""
    for kind, (words, holds) in _IS.items():
        if key in _TYPES[kind].split() and not holds(value):
            return words
    for size, most in _MOST.items():
        if key in SIZE_KEYS[size] and _number(value) and value > most:
            return f"at most {most:,}"
    is_known = family_of(config["model_type"]).layers  # then sizes are checked at their use
    if key in SIZE_KEYS["hidden"] and not is_known and not (type(value) is int and value > 0):
        return "an integer of at least 1"
    if key == "cell" and config["model_type"] == "recurrent" and value not in [*CELL_STATES]:
        return f"one of {', '.join(CELL_STATES)}"
    if key.endswith(DROPOUT_ENDINGS) and _number(value) and not 0 <= value <= 1:
        return "a probability, from 0 to 1"
    rows = config.get("vocab_size")
    if key == "pad_token_id" and isinstance(value, int) and isinstance(rows, int) and value >= rows:
        return f"less than vocab_size, which is {rows}"
    return None


_TABLES = ("rope_parameters", "rope_scaling")
_TYPE, _THETA, _PARTIAL = "rope_type", "rope_theta", "partial_rotary_factor"
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
_OF_ALL = {_TYPE, "type", _THETA, _PARTIAL, "original_max_position_embeddings"}


def rotary_problems(config: Mapping[str, Any], run: RunConfig) -> Iterator[str]:
    """Yield the problems of overridden rotary settings: missing keys of their type, and keys that
    are ignored.
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
    """Yield the problems of one table, in which `given` is overridden."""
    kind = table.get(_TYPE, table.get("type", "default"))
    if kind not in _KEYS:
        if {_TYPE, "type"} & given.keys():  # otherwise a type of the model itself
            near = did_you_mean(str(kind), _KEYS)
            yield (
                f"{key}.{_TYPE} ({origin}) is {kind!r}, which is not one of "
                f"{', '.join(_KEYS)}{near}"
            )
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
            types = [rope_type for rope_type, keys in _KEYS.items() if name in (*keys[0], *keys[1])]
            able = [
                rope_type for rope_type in types if {*_KEYS[rope_type][0]} <= table.keys()
            ] or types
            yield (
                f"{key}.{name} ({origin}) changes nothing: the rotary type {kind} does not read "
                f"it: set {key}.{_TYPE} to {' or '.join(able)}, too"
            )
        elif name not in _OF_TYPES | _OF_ALL and near:
            yield f"{key}.{name} ({origin}) is not a rotary setting{near}"


_TABLE, _SCALING = "rope_parameters", "rope_scaling"
# Former places of a rotary table's keys, with their names in the table.
_OLD = {_THETA: _THETA, "rotary_emb_base": _THETA, _PARTIAL: _PARTIAL, "rotary_pct": _PARTIAL}
_LOCAL = "rope_local_base_freq"
_ROTARY = {*_OLD, _LOCAL, _SCALING, _TABLE}
_INTO_TABLE = {_THETA, _PARTIAL, _SCALING}
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern")
_ELSEWHERE = {
    "dtype": "the DeepSpeed JSON sets it: set bf16.enabled or fp16.enabled instead",
    "torch_dtype": "the DeepSpeed JSON sets it: set bf16.enabled or fp16.enabled instead",
    "quantization_config": "weights are not quantized in training (see model.lora.quantize): "
    "remove it",
    "attn_implementation": "set model.attention instead",
    "_attn_implementation": "set model.attention instead",
    "use_cache": "training keeps no cache, and an export would be served without one: remove it",
    "architectures": "model_type determines the class: set model.overrides.model_type instead",
}

_SERVED = ("use_cache", True)
"""An override that an export may need if its source was saved without a cache."""


def overridden(
    config: Mapping[str, Any],
    run: RunConfig,
    source: str,
    recorded: Mapping[str, Any],
    note: Callable[[str, str], None],
) -> dict[str, Any]:
    """Return a model config with model.overrides applied. `recorded`: the model config of the run
    being continued, which keeps its overrides. `note` receives kind and message of an event about
    overrides without effect.

    Raises ConfigError with the problems of all other overrides that are unknown or have no effect.
    """
    overrides = run.model.overrides
    model_type = overrides.get("model_type", config["model_type"])
    if not isinstance(model_type, str):  # everything below looks it up
        raise ConfigError(
            f"{_named('model_type', run)} is {shortened(model_type)}: it must be a name"
        )
    merged = _merged(config, overrides)
    kept = {key for key in overrides if key in recorded and recorded[key] == merged[key]}
    said = set[str]()

    def check(problems: Iterator[tuple[Collection[str], str]]) -> None:
        idle = [(keys, text) for keys, text in problems if not said.issuperset(keys)]
        if others := [text for keys, text in idle if not kept.issuperset(keys)]:
            raise ConfigError(others)
        for keys, text in idle:
            said.update(keys)
            note("kept", f"{text}; it stays, because the resumed run has it")

    check(_unread(config, model_type, run, source))
    rotary = {key: value for key, value in overrides.items() if key in _ROTARY and value != "null"}
    if problems := [*value_problems({"model_type": model_type, **rotary}, run, source)]:
        raise ConfigError(problems)
    beside = {key for key in kept & _ROTARY - {_TABLE} if config.get(_TABLE)}
    merged = _applied(config, overrides, run, beside)
    check(_without_effect(config, merged, run, beside))
    if problems := [*rotary_problems(merged, run)]:
        raise ConfigError(problems)
    if same := already_so(config, run, beside):
        names = ", ".join(f"model.overrides.{key}" for key in same)
        has, values = ("have", "these values") if len(same) > 1 else ("has", "this value")
        note("idle_overrides", f"{names} {has} no effect: {source} already has {values}")
    return merged


def already_so(
    config: Mapping[str, Any], run: RunConfig, beside: Collection[str] = ()
) -> list[str]:
    """Return the overrides whose values the model config already has."""
    overrides = run.model.overrides
    merged = _applied(config, overrides, run, beside)

    def without(key: str) -> dict[str, Any]:
        return {other: value for other, value in overrides.items() if other != key}

    return [key for key in overrides if _applied(config, without(key), run, beside) == merged]


def _applied(
    config: Mapping[str, Any],
    overrides: Mapping[str, Any],
    run: RunConfig,
    beside: Collection[str] = (),
) -> dict[str, Any]:
    """Return a config with overrides applied, except rotary ones in `beside`, which do nothing."""
    into = {k: v for k, v in overrides.items() if k in _ROTARY and k not in beside}
    others = {key: value for key, value in overrides.items() if key not in into}
    rotary = {key: None if value == "null" else value for key, value in into.items()}
    return _with_rotary(_merged(config, _under_all_names(config, others)), rotary, run)


def _under_all_names(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides with each size repeated under every name that the config has for it, because
    its reader takes only one of them.
    """
    named: dict[str, Any] = {}
    for key, value in overrides.items():
        names = next((names for names in SIZE_KEYS.values() if key in names), ())
        others = [name for name in names if name in config and name not in overrides]
        same = [name for name in others if config[name] == config.get(key, config[name])]
        if key in config or not same:
            named[key] = value
        named |= dict.fromkeys(same, value)
    return named


def _named(key: str, run: RunConfig) -> str:
    return f"model.overrides.{key} ({run.origin(f'model.overrides.{key}')})"


def _unread(
    config: Mapping[str, Any], model_type: str, run: RunConfig, source: str
) -> Iterator[tuple[Collection[str], str]]:
    """Yield overrides that no model of this type reads, each with its problem."""
    own = keys_read(model_type) if "auto_map" not in config else None
    dropouts = {*family_of(model_type).dropouts}
    rotates = own is not None and _TABLE in own
    reached = _INTO_TABLE if rotates and config.get(_TABLE) else set[str]()
    if own is not None and own.isdisjoint({_PARTIAL, "rotary_pct"}):  # of gpt_neox
        reached = reached - {_PARTIAL}
    for key in run.model.overrides:
        named, keys = f"{_named(key, run)} ", (key,)
        if key in _ELSEWHERE and (key, run.model.overrides[key]) != _SERVED:
            yield keys, f"{named}changes nothing: {_ELSEWHERE[key]}"
        elif key == "model_type" or (own is not None and key in own | dropouts | reached):
            continue
        elif own is None:
            if key not in {*config, *every_key()}:
                near = did_you_mean(key, {*config, *every_key()})
                yield keys, f"{named}is not a config key of {source}{near}"
        elif key in config or key in every_key():
            near = did_you_mean(key, own)
            if rotates and key in _ROTARY - {_PARTIAL}:
                near = f": set model.overrides.{_TABLE}"
            yield keys, f"{named}changes nothing: {model_type} models do not read it{near}"
        else:
            near = did_you_mean(key, {*config, *own})
            yield keys, f"{named}is not a config key of {source}{near}"


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with overrides applied; tables merge key by key, "null" becomes None."""
    merged = dict(config)
    for key, override in overrides.items():
        old, value = merged.get(key), None if override == "null" else override
        both_tables = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(old, value) if both_tables else value  # type: ignore[arg-type]
    return merged


def _with_rotary(
    config: dict[str, Any], overrides: Mapping[str, Any], run: RunConfig
) -> dict[str, Any]:
    """Return a config with rotary settings overridden where its reader looks for them.

    transformers uses rope_parameters if present and then ignores the former keys; a non-empty
    rope_scaling replaces them all.
    """
    table = config.get(_TABLE)
    if not overrides or not (isinstance(table, Mapping) and table):
        moves = _TABLE in overrides and isinstance(config.get(_SCALING), Mapping)
        merged = _merged(_moved(config) if moves else config, overrides)
        if isinstance(scaling := overrides.get(_SCALING), Mapping):
            merged[_SCALING] = _rescaled(config.get(_SCALING) or {}, scaling)
        return merged
    config = {key: value for key, value in config.items() if key not in _ROTARY - {_TABLE}}
    for key, value in overrides.items():
        by_layer = _by_layer(table)
        if key != _TABLE and (by_layer or key not in _INTO_TABLE | {*_OLD}):
            raise ConfigError(
                f"{_named(key, run)} is {shortened(value)}, but the model has one RoPE table per "
                f"layer type: set model.overrides.{'.'.join([_TABLE, *by_layer[:1]])}"
            )
        if key == _TABLE and value is not None:
            _require_same_kind(value, by_layer, run)
            table = _merged(table, value)
        elif key == _TABLE:
            table = None
        elif key == _SCALING:
            table = _rescaled(table, value)
        else:
            table = {**table, _OLD[key]: value}
        if table is None:
            break
    return {**config, _TABLE: table}


def _moved(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with its former rotary keys moved into rope_parameters."""
    old = {new: config[key] for key, new in _OLD.items() if config.get(key) is not None}
    kept = {key: value for key, value in config.items() if key not in {*_OLD, _SCALING}}
    return {**kept, _TABLE: {**old, **config[_SCALING]}}


def _by_layer(table: Mapping[str, Any]) -> list[str]:
    """Return the layer types that have a separate table of rotary settings."""
    return [key for key, value in table.items() if isinstance(value, Mapping)]


def _require_same_kind(value: Mapping[str, Any], by_layer: list[str], run: RunConfig) -> None:
    """Raise ConfigError for values outside the tables per layer type, which would be lost."""
    if by_layer and (lost := [key for key in value if key not in by_layer]):
        raise ConfigError(
            f"{_named(_TABLE, run)} has {', '.join(lost)}, but the model has one RoPE table per "
            f"layer type: set model.overrides.{_TABLE}.{by_layer[0]}.{lost[0]}"
        )


def _rescaled(table: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return rotary settings with another scaling; theta and the rotated part stay."""
    kept = {key: value for key, value in table.items() if key in (_THETA, _PARTIAL)}
    if scaling is None:
        return {**kept, _TYPE: "default"}
    before = table.get(_TYPE, table.get("type"))
    kind = scaling.get(_TYPE, scaling.get("type", before))
    same = {key: value for key, value in table.items() if key != "type"}
    named = {} if kind is None else {_TYPE: kind}  # the reader prefers this name
    return {**(same if kind == before else kept), **scaling, **named}


def _without_effect(
    config: Mapping[str, Any], merged: Mapping[str, Any], run: RunConfig, beside: Collection[str]
) -> Iterator[tuple[Collection[str], str]]:
    """Yield overrides that other values of the config keep from having an effect, with the problem.
    `beside`: overrides that rope_parameters supersedes.
    """
    overrides = run.model.overrides
    windows = [key for key in _WINDOWS if key in overrides and overrides[key] != config.get(key)]
    if windows and _is_idle_window(config, merged):
        verb = "changes" if len(windows) == 1 else "change"
        named = " and ".join(_named(key, run) for key in windows)
        yield windows, f"{named} {verb} nothing: {_why_no_window(merged)}"
    key = "router_aux_loss_coef"
    if key in overrides and not merged.get("output_router_logits"):
        use = "set model.overrides.output_router_logits=true, too"
        yield (key,), f"{_named(key, run)} changes nothing without the router's loss: {use}"
    key = "initializer_range"
    if key in overrides and run.model.init_from is not None:
        why = "the weights come from model.init_from"
        yield (key,), f"{_named(key, run)} changes nothing: {why}"
    for key in sorted(beside):
        yield (key,), f"{_named(key, run)} changes nothing: the model reads {_TABLE}"


def _is_idle_window(config: Mapping[str, Any], merged: Mapping[str, Any]) -> bool:
    """Return True if the overrides change no layer's window."""
    if _asks(merged) and merged.get("sliding_window") and not merged.get("use_sliding_window"):
        return True  # the class then removes the window
    windows = (*_WINDOWS, "layer_types")
    without = {key: value for key, value in merged.items() if key not in windows}
    without |= {key: config[key] for key in windows if key in config}
    slides = _slides(merged)
    return slides is not None and slides == _slides(without)


def _slides(config: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """Return the window of each layer; None if unknown."""
    try:
        return Shape.from_hf(config).sliding_windows
    except (TypeError, ValueError):  # invalid sizes are reported later
        return None


def _why_no_window(config: Mapping[str, Any]) -> str:
    """Return why no layer has a window, and everything to set so that one does."""
    why, settings = "no layer has a sliding window", []
    if not config.get("sliding_window"):
        settings.append("model.overrides.sliding_window")
    if _asks(config) and not config.get("use_sliding_window"):
        settings.append("model.overrides.use_sliding_window=true")
    layers = next((config[k] for k in SIZE_KEYS["layers"] if k in config), 0)
    first = config.get("max_window_layers", 28)  # the classes' own default
    are_counts = isinstance(layers, int) and isinstance(first, int)
    if kinds := config.get("layer_types"):
        if "sliding_attention" not in kinds:
            why = "layer_types of the config selects the layers with a sliding window"
            use = 'model.overrides.layer_types, "sliding_attention" for each such layer'
            settings.append(use)
    elif _asks(config) and are_counts and first >= layers:
        why = (
            f"of {layers} layers, only those from max_window_layers, {first}, on have a "
            "sliding window"
        )
        settings.append("model.overrides.max_window_layers=0")
    return f"{why}: set {' and '.join(settings)}, too" if settings else why


def _asks(config: Mapping[str, Any]) -> bool:
    """Return True if a model uses windows only with use_sliding_window."""
    return "use_sliding_window" in (keys_read(config["model_type"]) or ())
