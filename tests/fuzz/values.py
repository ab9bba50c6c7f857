"""Values that nobody expects, and their spelling in JSON and TOML."""

from __future__ import annotations

import json
import random
from typing import Any

# Written as they stand in place of the quoted word: no serialiser gets that far.
RAW = {
    "@nested@": "[" * 3000 + "]" * 3000,
    "@tables@": '{"a":' * 1500 + "1" + "}" * 1500,
    "@digits@": "9" * 5000,
    "@nan@": "NaN",
    "@infinity@": "Infinity",
    "@negative infinity@": "-Infinity",
    "@exponent@": "1e999",
}
_TOML = {
    "@tables@": "{a=" * 1500 + "1" + "}" * 1500,
    "@nan@": "nan",
    "@infinity@": "inf",
    "@negative infinity@": "-inf",
}
NUMBERS = (
    *(-1, 0, 1, 2, 3, 7, 64, 1000, 65_536, 10**6, 10**8, 10**9, 2**31, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64, 10**19, 10**30, -(10**30), 10**310),
    *(0.0, -0.0, 0.5, 1.0, -1.5, 1.0000001, 1e-30, 5e-324, 1e30, 1.7e308, 3.0e9),
)
TEXTS = (
    *("", " ", "auto", "none", "null", "true", "0", "1e3", "x", "None", "nan", "cpu", "cuda"),
    *("adamw", "fp16", "AdamW", "os.system", "../..", "/", "/dev/null", "/proc/self/mem", "."),
    *("~nosuchuser/x", "$(touch executed)", "`touch executed`", "; touch executed", "%s%n"),
    *("{0.__class__}", "${HOME}", "a" * 300, "a" * 20_000, "/" + "a" * 300, "x/" * 2500),
    *("ü", "数据", "\u202egnp", "\U0001d518", "é", "\x00", "a\x00b", "\x1b[31m", "\n", "\ufeff"),
    *("(a+)+$", "*", "[", "\\", "'", '"', "a=b", "a,b", "1:2", "10:5", "999999999:1000000000"),
)


def hostile(draw: random.Random) -> Any:
    """A value of any type; RAW's words stand for what no serialiser writes."""
    kind = draw.randrange(10)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 6:
        return draw.choice(TEXTS)
    if kind == 6:
        return draw.choice([True, False, None])
    if kind == 7:
        return draw.choice([*RAW])
    if kind == 8:
        return [hostile(draw) for _ in range(draw.choice((0, 1, 2, 2, 3)))]
    names = ("type", "enabled", "params", "device", "lr", "a", "", "0", "rope_type", "factor")
    return {draw.choice(names): hostile(draw) for _ in range(draw.choice((0, 1, 2)))}


def to_json(value: Any, indent: int | None = 2) -> str:
    """A value as JSON, RAW's words replaced."""
    return _with_raw(json.dumps(value, indent=indent), RAW)


def to_toml(value: Any) -> str:
    """One value as TOML, on one line; null, which TOML lacks, is a bare word."""
    return _with_raw(_toml(value), {**RAW, **_TOML})


def toml_document(tree: dict[str, Any]) -> str:
    """A run config: keys, then a table for each section."""
    plain = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    lines = [f"{_toml_key(key)} = {to_toml(value)}" for key, value in plain.items()]
    for name, table in tree.items():
        if isinstance(table, dict):
            lines += ["", f"[{_toml_key(name)}]"]
            lines += [f"{_toml_key(key)} = {to_toml(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "null" if value is None else json.dumps(value)


def _toml_key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else json.dumps(key)


def _with_raw(text: str, raws: dict[str, str]) -> str:
    for word, raw in raws.items():
        text = text.replace(json.dumps(word), raw)
    return text
