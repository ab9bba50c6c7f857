"""Recognises config files of other programs and words the problem in one line."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("foreign.toml")
_ENOUGH = 3
"""Keys of one kind that identify a file of it: one or two may be a coincidence."""


@functools.cache
def _kinds() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def foreign_config(path: object, keys: Iterable[str], wanted: str) -> str | None:
    """Return the problem of a config whose top-level `keys` are those of another kind than `wanted`
    (a table of foreign.toml); None if they are not.
    """
    plain = {key.replace("-", "_") for key in keys}
    kinds = _kinds()
    hits = {kind: len(plain & set(table["keys"].split())) for kind, table in kinds.items()}
    kind = max((kind for kind in hits if kind != wanted), key=lambda kind: hits[kind])
    if hits[kind] < max(_ENOUGH, hits[wanted] + 1):
        return None
    table = kinds[kind]
    problem = f"{path} is {table['name']}, not {kinds[wanted]['name']}"
    if option := table.get("option"):
        return f"{problem}: give it with {option}"
    places = [f"{key} is {place}" for key, place in table["here"].items() if key in plain]
    instead = "write what is learned"
    if wanted == "deepspeed":
        instead = "give --deepspeed one of ds_configs/, and write what is learned"
    replacements = f" ({'; '.join(places)})" if places else ""
    return f"{problem}: {instead} as keys of the run config{replacements}"


def top_level_keys(text: str) -> list[str]:
    """Return the keys, and TOML tables, at the line starts of a text that could not be parsed."""
    matches = re.findall(
        r"""^[ \t]{0,4}(?:\[([\w-]+)\]|["']?([A-Za-z_][\w-]*)["']?[ \t]*[:=])""", text, re.MULTILINE
    )
    return [table or key for table, key in matches]
