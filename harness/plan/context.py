"""model.context: rotary positions beyond the length that a model was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.layout.families import SIZE_KEYS, family_of

_KEYS = ("rope_parameters", "rope_scaling")
"""Keys of rotary settings in a config.json; the second is transformers 4's."""
_INSTEAD = "set model.overrides.rope_parameters and model.overrides.max_position_embeddings instead"


def extended(config: dict[str, Any], run: RunConfig) -> dict[str, Any]:
    """Return a model config with rotary positions extended as the run config says.

    Raises ConfigError for a model whose positions cannot be extended.
    """
    context, way = run.model.context, run.model.rope
    if context is None:
        if run.is_set("model.rope"):
            raise ConfigError(
                "model.rope has no effect without model.context: set model.context, too, or "
                "remove it"
            )
        return config
    key, positions = positions_of(config)
    if why := why_not(config):
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
        names = [name for name in _KEYS if config.get(name)] or [_KEYS[1]]
        scaling = {"rope_type": way, "factor": context / positions}
        if way == "yarn":
            scaling["original_max_position_embeddings"] = positions
        return {**config, names[0]: {**(config.get(names[0]) or {}), **scaling}, key: context}
    raise ConfigError(f"model.context is {context} ({run.origin('model.context')}), {problem}")


def _theta(config: Mapping[str, Any]) -> float | None:
    """Return the base of a config's rotary frequencies; None if it has none."""
    tables = [config[key] for key in _KEYS if config.get(key)]
    return next(
        (table["rope_theta"] for table in (*tables, config) if table.get("rope_theta")), None
    )


def _with_theta(config: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return a config with the rotary frequencies that transformers' `dynamic` (factor 1) has for a
    text longer than the trained positions by `factor`; here for texts of any length.
    """
    theta, dim = _theta(config), _rotated(config)
    assert theta is not None, "checked before"
    scaled = {"rope_theta": theta * factor ** (dim / (dim - 2))}
    for key in _KEYS:
        if config.get(key) and "rope_theta" in config[key]:
            config = {**config, key: {**config[key], **scaled}}
    return config | scaled if "rope_theta" in config else config


def _rotated(config: Mapping[str, Any]) -> int:
    """Return the number of rotated elements per head."""
    sizes = (next((config[k] for k in SIZE_KEYS[s] if k in config), 0) for s in ("hidden", "heads"))
    hidden, heads = sizes
    head = config.get("qk_rope_head_dim") or config.get("head_dim") or hidden // heads
    tables = [config[key] for key in _KEYS if config.get(key)]
    names = ("partial_rotary_factor", "rotary_pct")
    shares = [table[name] for table in (*tables, config) for name in names if name in table]
    return int(config.get("rotary_dim") or head * next(iter(shares), 1.0))


def why_not(config: Mapping[str, Any]) -> str:
    """Return why a model's positions cannot be extended; "" if they can."""
    kind = config["model_type"]
    family = family_of(kind)
    tables = [config[key] for key in _KEYS if config.get(key)]
    has_others = family.learned_positions or family.alibi or config.get("alibi")
    is_rotary = bool(family.layers or tables or config.get("rope_theta"))
    if has_others or not is_rotary or not positions_of(config)[1]:
        return f"{kind} models have no known number of rotary positions"
    if any(isinstance(value, Mapping) for table in tables for value in table.values()):
        return f"it has separate rotary settings for each type of layer: {_INSTEAD}"
    if scaled := rope_types(config) - {"default"}:
        return (
            f"its positions are already scaled ({', '.join(sorted(map(str, scaled)))}): {_INSTEAD}"
        )
    return ""


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """Return how a model's rotary positions are scaled: "default", "yarn", "longrope", ..."""
    tables = [config[key] for key in _KEYS if config.get(key)]
    by_layer = [t for table in tables for t in table.values() if isinstance(t, Mapping)]
    return {t.get("rope_type", t.get("type", "default")) for t in (*tables, *by_layer)}


def or_longer(config: Mapping[str, Any], run: RunConfig, length: int) -> str:
    """Return how to give the model `length` positions, as the end of advice, or ""."""
    if run.model.context is not None or not why_not(config):
        return f", or model.context={length}, to extend its positions"
    if family_of(config["model_type"]).learned_positions:
        return ""
    key, _ = positions_of(config)
    return f", or model.overrides.{key}={length}, to train positions that it has not seen"


def positions_of(config: Mapping[str, Any]) -> tuple[str, int]:
    """Return the key and the value of the number of positions; 0 if there is none."""
    for key in SIZE_KEYS["positions"]:
        if isinstance(config.get(key), int):
            return key, config[key]
    return SIZE_KEYS["positions"][0], 0
