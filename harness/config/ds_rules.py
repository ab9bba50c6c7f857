"""The rules of ds_refused.toml: reasons to refuse a DeepSpeed JSON, and changes made to it."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.config.ds_json import DsJson
from harness.config.ds_keys import default_of

_REFUSED_FILE = Path(__file__).with_name("ds_refused.toml")

Rule = Mapping[str, Any]


@functools.cache
def rules() -> list[Rule]:
    """Return the rules; the file documents their keys."""
    table: list[Rule] = tomllib.loads(_REFUSED_FILE.read_text(encoding="utf-8"))["rule"]
    return table


def apply_changes(ds: DsJson, accelerator: str = "cuda") -> None:
    """Apply every rule that changes a key's value, or leaves keys out."""
    for rule in rules():
        if "left_out" in rule and _applies(rule, ds, accelerator):
            for key in rule["left_out"]:
                if ds.literal(key) not in (None, default_of(key)):
                    ds.remove(key, rule["why"])
        if "instead" in rule and _applies(rule, ds, accelerator):
            ds.set(rule["key"], rule["instead"], rule["why"])


def refusals(ds: DsJson, accelerator: str = "cuda") -> Iterator[Rule]:
    """Yield the rules that refuse a JSON whose keys are known and whose precision is decided."""
    for rule in rules():
        if not rule.keys() & {"instead", "left_out"} and _applies(rule, ds, accelerator):
            yield rule


def _applies(rule: Rule, ds: DsJson, accelerator: str) -> bool:
    """Return True if a rule's conditions hold, none of them about a key that was rejected."""
    required, unless = rule.get("when", {}), rule.get("unless", {})
    return (
        rule.get("on", accelerator) == accelerator
        and not required.keys() & ds.rejected
        and all(_is_among(ds, key, values) for key, values in required.items())
        and not any(_is_among(ds, key, values) for key, values in unless.items())
    )


def _is_among(ds: DsJson, key: str, values: list[Any]) -> bool:
    value = ds.value(key)
    return ("null" if value is None else value) in values
