"""Tables of tests: TOML files beside them, whose rows may share parts."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def beside(module: str, name: str, *, with_parts: bool = False) -> dict[str, Any]:
    """Return the tables of a file beside a module.

    A text "$name" stands for that part of the table [parts], "$null" for None. The key "$" of a
    table names parts, to which its other keys are added.
    """
    tables = tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
    parts: dict[str, Any] = {"null": None}
    for part, value in tables.pop("parts", {}).items():
        parts[part] = _filled(value, parts)
    filled = {key: _filled(value, parts) for key, value in tables.items()}
    return {**filled, "parts": parts} if with_parts else filled


def _filled(value: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_filled(each, parts) for each in value]
    if isinstance(value, dict):
        filled: dict[str, Any] = {}
        for part in value.get("$", "").split():
            filled |= parts[part]
        return filled | {key: _filled(each, parts) for key, each in value.items() if key != "$"}
    return parts[value[1:]] if isinstance(value, str) and value.startswith("$") else value
