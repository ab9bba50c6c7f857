"""Checks of model config values that transformers accepts but fails on when it builds the model."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.config.run_config import RunConfig
from harness.errors import shortened
from harness.layout.carried import CELL_STATES
from harness.layout.families import SIZE_KEYS, family_of

_TYPES = tomllib.loads(Path(__file__).with_name("model_keys.toml").read_text(encoding="utf-8"))[
    "types"
]
DROPOUT_ENDINGS = ("dropout", "pdrop", "dropout_prob")
_MOST = {"layers": 2_000, "experts": 100_000}
"""Largest counts, since a plan walks through layers and experts one by one."""


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
    """Yield the problems of a config's values, overrides applied; null is fine anywhere."""
    for key, value in config.items():
        must_be = None if value is None else _must_be(key, value, config)
        if must_be:
            place = f"{key} ({source})"
            if key in run_config.model.overrides:
                origin = run_config.origin(f"model.overrides.{key}")
                place = f"model.overrides.{key} ({origin})"
            yield f"{place} is {shortened(value)}: it must be {must_be}"


def _must_be(key: str, value: Any, config: Mapping[str, Any]) -> str | None:
    """Return the values that a key may have; None if its value is fine or the key is unknown."""
    for kind, (words, holds) in _IS.items():
        if key in _TYPES[kind].split() and not holds(value):
            return words
    for size, most in _MOST.items():
        if key in SIZE_KEYS[size] and _number(value) and value > most:
            return f"at most {most:,}"
    is_known = family_of(config["model_type"]).layers  # then its sizes are checked where they count
    if key in SIZE_KEYS["hidden"] and not is_known and not (type(value) is int and value > 0):
        return "a whole number of at least 1"
    if key == "cell" and config["model_type"] == "recurrent" and value not in [*CELL_STATES]:
        return f"one of {', '.join(CELL_STATES)}"
    if key.endswith(DROPOUT_ENDINGS) and _number(value) and not 0 <= value <= 1:
        return "a probability, from 0 to 1"
    rows = config.get("vocab_size")
    if key == "pad_token_id" and isinstance(value, int) and isinstance(rows, int) and value >= rows:
        return f"less than vocab_size, which is {rows}"
    return None
