"""Limits on configs that users write: nesting, numbers, texts. Anything beyond is rejected."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_FILE_BYTES = 4 * 2**20
"""Largest config file; configs that people write have a few kilobytes."""
MAX_DEPTH = 64
"""Deepest nesting of tables and arrays."""
MAX_INTEGER = 2**63 - 1
"""Largest TOML integer, and largest that a tensor holds."""
_DOTTED = re.compile(r"""[\w"'-]++(?:\s*+\.\s*+[\w"'-]++)*+""")


def parsed_toml(text: str) -> dict[str, Any]:
    """Return a TOML text as a dict. Raises TOMLDecodeError, and ValueError beyond the limits."""
    # tomllib keeps every prefix of a dotted key: gigabytes for a text of a megabyte.
    if any(match[0].count(".") > MAX_DEPTH for match in _DOTTED.finditer(text)):
        raise ValueError(f"a key in it has more than {MAX_DEPTH} parts: it is too deep")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def beyond_bounds(tree: Any) -> str | None:
    """Return why a parsed config is too deep, too large or not valid text; None if it is fine.

    The value itself is not shown: it may be a million characters long.
    """
    level, depth = [("", tree)], 0
    while level:
        if depth > MAX_DEPTH:
            return f"{_place(level)} is nested more than {MAX_DEPTH} deep"
        inner = []
        for key, value in level:
            if isinstance(value, dict):
                for name, item in value.items():
                    if problem := _bad_text(name):
                        return f"a key in {key or 'it'} {problem}"
                    inner.append((f"{key}.{name}" if key else name, item))
            elif isinstance(value, list):
                inner += [(key, item) for item in value]
            elif isinstance(value, int) and abs(value) > MAX_INTEGER:
                return f"{key} is an integer of more than 64 bits"
            elif isinstance(value, str) and (problem := _bad_text(value)):
                return f"{key} {problem}"
        level, depth = inner, depth + 1
    return None


def _place(level: list[tuple[str, Any]]) -> str:
    key = level[0][0]
    return key if len(key) <= 60 else key[:60] + "..."


def _bad_text(text: str) -> str | None:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        return "has bytes that are not UTF-8"
    return "has a null character" if "\0" in text else None
