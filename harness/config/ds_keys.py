"""The keys that DeepSpeed knows, with their defaults, and the values that a JSON gives them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

AUTO = "auto"
_KEYS_FILE = Path(__file__).with_name("ds_keys.json")


@functools.cache
def ds_keys() -> dict[str, Any]:
    """Return the table of tools/proofs/generate_ds_keys.py: {"keys": ...} of sections and keys."""
    table: dict[str, Any] = json.loads(_KEYS_FILE.read_text(encoding="utf-8"))
    return table


def literal(ds: Mapping[str, Any], key: str) -> Any:
    """Return the JSON's own value of a dotted key, None if it is absent, null or "auto"."""
    value: Any = ds
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value == AUTO else value


def value_of(ds: Mapping[str, Any], key: str) -> Any:
    """Return the value that DeepSpeed will see: the JSON's literal, or its own default.

    A section that is absent counts as one with all defaults. Raises KeyError for an unknown key.
    """
    node = ds_keys()
    for name in key.split("."):
        node = node["keys"][name]
    value = literal(ds, key)
    return node.get("default") if value is None else value


def default_of(key: str) -> Any:
    """Return DeepSpeed's default of a dotted key; None of a section, or one that it has not."""
    node: Mapping[str, Any] = ds_keys()
    for name in key.split("."):
        node = node.get("keys", {}).get(name, {})
    return node.get("default")


def offloaded_to(ds: Mapping[str, Any], part: Literal["optimizer", "param"]) -> str:
    """Return the device of the optimizer's states or of the weights; "none" for ZeRO's own."""
    return str(value_of(ds, f"zero_optimization.offload_{part}.device"))
