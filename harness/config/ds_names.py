"""DeepSpeed keys with two names: only the first name is used here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.ds_keys import ds_keys


def use_first_names(ds: dict[str, Any], name: str) -> list[str]:
    """Rename every key to its first name, in place; return the problems of a JSON called `name`."""
    return list(_use_first_names(ds, ds_keys(), "", name))


def first_name(key: str) -> str:
    """Return a dotted key under its first name."""
    node, names = ds_keys(), []
    for name in key.split("."):
        first = node.get("keys", {}).get(name, {}).get("same_as", name)
        node = node.get("keys", {}).get(first, {})
        names.append(first)
    return ".".join(names)


def _use_first_names(
    values: dict[str, Any], section: Mapping[str, Any], prefix: str, file: str
) -> Iterator[str]:
    for name, value in list(values.items()):
        first = section["keys"].get(name, {}).get("same_as", name)
        node = section["keys"].get(first, {})
        if first != name:
            del values[name]
            if first in values:
                yield f"{prefix}{first} and {prefix}{name} ({file}) are one key: keep one of them"
            values.setdefault(first, value)
        if "keys" in node and isinstance(value, dict):
            yield from _use_first_names(value, node, f"{prefix}{first}.", file)
