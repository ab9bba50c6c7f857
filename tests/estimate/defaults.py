"""DeepSpeed's own defaults for the keys that cost memory."""

from __future__ import annotations

from typing import Any

from harness.config.ds_json import value_of


def default_value(key: str, **changes: Any) -> Any:
    """Return DeepSpeed's defaults for an empty JSON."""
    return changes.get(key.rpartition(".")[2], value_of({}, key))
