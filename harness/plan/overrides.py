"""`model.overrides`: keys of a config.json that a run changes.

An override that would have no effect on the model is rejected, with advice.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.config.assignments import did_you_mean
from harness.config.run_config import RunConfig
from harness.errors import ConfigError, shortened
from harness.layout.families import SIZE_KEYS, family_of, given_size
from harness.layout.shape import Shape
from harness.layout.state_size import CELL_STATES
from harness.layout.tensor import every_key, keys_read
from harness.plan.rotary import (
    INTO_TABLE,
    PARTIAL,
    ROTARY,
    TABLE,
    merged,
    override_named,
    rotary_problems,
    with_rotary,
)

DROPOUT_ENDINGS = ("dropout", "pdrop", "dropout_prob")
_MOST = {"layers": 2_000, "experts": 100_000}
"""Maximum counts, because a plan iterates over layers and experts."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_TYPES: dict[str, tuple[Callable[[Any], bool], list[str]]] = {
    "a number": (_is_number, _TABLES["numbers"]),
    "true or false": (lambda value: isinstance(value, bool), _TABLES["booleans"]),
    "a name, in quotes": (lambda value: isinstance(value, str), _TABLES["names"]),
    "a list": (lambda value: isinstance(value, list), _TABLES["lists"]),
    "a table": (lambda value: isinstance(value, Mapping), _TABLES["tables"]),
}


def value_problems(config: Mapping[str, Any], run: RunConfig, source: str) -> Iterator[str]:
    """Yield the problems of a config's values after overrides; null is always valid."""
    for key, value in config.items():
        if value is not None and (must_be := _must_be(key, value, config)):
            is_ours = key in run.model.overrides
            place = override_named(key, run) if is_ours else f"{key} ({source})"
            yield f"{place} is {shortened(value)}: it must be {must_be}"


def _must_be(key: str, value: Any, config: Mapping[str, Any]) -> str | None:
    """Return the valid values of a key; None if its value is valid or the key is unknown."""
    for words, (holds, keys) in _TYPES.items():
        if key in keys and not holds(value):
            return words
    for size, most in _MOST.items():
        if key in SIZE_KEYS[size] and _is_number(value) and value > most:
            return f"at most {most:,}"
    is_known = family_of(config["model_type"]).layers  # then sizes are checked at their use
    is_size = key in (*SIZE_KEYS["hidden"], "vocab_size")
    if is_size and not is_known and not (type(value) is int and value > 0):
        return "an integer of at least 1"
    if key == "cell" and config["model_type"] == "recurrent" and value not in [*CELL_STATES]:
        return f"one of {', '.join(CELL_STATES)}"
    if key.endswith(DROPOUT_ENDINGS) and _is_number(value) and not 0 <= value <= 1:
        return "a probability, from 0 to 1"
    rows = config.get("vocab_size")
    if key == "pad_token_id" and isinstance(value, int) and isinstance(rows, int) and value >= rows:
        return f"less than vocab_size, which is {rows}"
    return None


_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern")
_ELSEWHERE: dict[str, str] = _TABLES["elsewhere"]
_SERVED = ("use_cache", True)
"""An override that an export may need if its source was saved without a cache."""


def overridden(
    config: Mapping[str, Any], run: RunConfig, source: str, note: Callable[[str, str], None]
) -> dict[str, Any]:
    """Return a model config with model.overrides applied. `note` receives kind and message of an
    event about overrides that set what the config has.

    Raises ConfigError with the problems of overrides that are unknown or have no effect.
    """
    overrides = run.model.overrides
    model_type = overrides.get("model_type", config["model_type"])
    if not isinstance(model_type, str):  # everything below looks it up
        place = override_named("model_type", run)
        raise ConfigError(f"{place} is {shortened(model_type)}: it must be a name")
    if problems := [*_unread(config, model_type, run, source)]:
        raise ConfigError(problems)
    rotary = {key: value for key, value in overrides.items() if key in ROTARY and value != "null"}
    if problems := [*value_problems({"model_type": model_type, **rotary}, run, source)]:
        raise ConfigError(problems)
    result = _applied(config, overrides, run)
    if problems := [*_without_effect(config, result, run)] or [*rotary_problems(result, run)]:
        raise ConfigError(problems)
    if same := already_so(config, run):
        names = ", ".join(f"model.overrides.{key}" for key in same)
        has, values = ("have", "these values") if len(same) > 1 else ("has", "this value")
        note("idle_overrides", f"{names} {has} no effect: {source} already has {values}")
    return result


def already_so(config: Mapping[str, Any], run: RunConfig) -> list[str]:
    """Return the overrides whose values the model config already has."""
    overrides = run.model.overrides
    result = _applied(config, overrides, run)

    def without(key: str) -> dict[str, Any]:
        others = {other: value for other, value in overrides.items() if other != key}
        return _applied(config, others, run)

    return [key for key in overrides if without(key) == result]


def _applied(
    config: Mapping[str, Any], overrides: Mapping[str, Any], run: RunConfig
) -> dict[str, Any]:
    """Return a config with overrides applied."""
    others = {key: value for key, value in overrides.items() if key not in ROTARY}
    rotary = {k: None if v == "null" else v for k, v in overrides.items() if k in ROTARY}
    return with_rotary(merged(config, _under_all_names(config, others)), rotary, run)


def _under_all_names(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides with each size under all of its names that the config has, because the
    model's class reads only one of them.
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


def _unread(
    config: Mapping[str, Any], model_type: str, run: RunConfig, source: str
) -> Iterator[str]:
    """Yield a problem for each override that no model of this type reads."""
    own = keys_read(model_type) if "auto_map" not in config else None
    known = {*config, *every_key()}
    read = {"model_type", *family_of(model_type).dropouts, *(known if own is None else own)}
    rotates = own is not None and TABLE in own
    if rotates and config.get(TABLE):
        read |= INTO_TABLE if read & {PARTIAL, "rotary_pct"} else INTO_TABLE - {PARTIAL}
    for key, value in run.model.overrides.items():
        named = override_named(key, run)
        if key in _ELSEWHERE and (key, value) != _SERVED:
            yield f"{named} changes nothing: {_ELSEWHERE[key]}"
        elif key in read:
            continue
        elif own is None or key not in known:
            near = did_you_mean(key, known if own is None else {*config, *own})
            yield f"{named} is not a config key of {source}{near}"
        else:
            advice = did_you_mean(key, own)
            if rotates and key in ROTARY - {PARTIAL}:
                advice = f": set model.overrides.{TABLE}"
            yield f"{named} changes nothing: {model_type} models do not read it{advice}"


def _without_effect(
    config: Mapping[str, Any], result: Mapping[str, Any], run: RunConfig
) -> Iterator[str]:
    """Yield a problem for each override that has no effect because of other values."""
    overrides = run.model.overrides
    windows = [key for key in _WINDOWS if key in overrides and overrides[key] != config.get(key)]
    if windows and _is_idle_window(config, result):
        verb = "changes" if len(windows) == 1 else "change"
        named = " and ".join(override_named(key, run) for key in windows)
        yield f"{named} {verb} nothing: {_why_no_window(result)}"
    reasons = dict[str, str]()
    if not result.get("output_router_logits"):
        use = "set model.overrides.output_router_logits=true, too"
        reasons["router_aux_loss_coef"] = f" without the router's loss: {use}"
    if run.model.init_from is not None:
        reasons["initializer_range"] = ": the weights come from model.init_from"
    for key, why in reasons.items():
        if key in overrides:
            yield f"{override_named(key, run)} changes nothing{why}"


def _is_idle_window(config: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Return True if the overrides change no layer's window."""
    if _asks(result) and result.get("sliding_window") and not result.get("use_sliding_window"):
        return True  # the class then removes the window
    windows = (*_WINDOWS, "layer_types")
    without = {key: value for key, value in result.items() if key not in windows}
    without |= {key: config[key] for key in windows if key in config}
    try:
        return Shape.from_hf(result).sliding_windows == Shape.from_hf(without).sliding_windows
    except (TypeError, ValueError):  # invalid sizes are reported later
        return False


def _why_no_window(config: Mapping[str, Any]) -> str:
    """Return why no layer has a window, and everything to set so that one does."""
    why, settings = "no layer has a sliding window", []
    if not config.get("sliding_window"):
        settings.append("model.overrides.sliding_window")
    if _asks(config) and not config.get("use_sliding_window"):
        settings.append("model.overrides.use_sliding_window=true")
    layers = given_size(config, "layers") or 0
    first = config.get("max_window_layers", 28)  # the classes' own default
    if kinds := config.get("layer_types"):
        if "sliding_attention" not in kinds:
            why = "layer_types of the config selects the layers with a sliding window"
            use = 'model.overrides.layer_types, "sliding_attention" for each such layer'
            settings.append(use)
    elif _asks(config) and isinstance(first, int) and first >= layers:
        why = (
            f"of {layers} layers, only those from max_window_layers, {first}, on have a "
            "sliding window"
        )
        settings.append("model.overrides.max_window_layers=0")
    return f"{why}: set {' and '.join(settings)}, too" if settings else why


def _asks(config: Mapping[str, Any]) -> bool:
    """Return True if a model uses windows only with use_sliding_window."""
    return "use_sliding_window" in (keys_read(config["model_type"]) or ())
