"""config.json of exports that include their model code: its keys beyond those of the family."""

from collections.abc import Mapping
from typing import Any

from harness.layout.recompute import REVERSIBLE

CODE = "modeling_as_trained"
"""The module beside the weights that transformers runs with trust_remote_code=True."""
ATTENTION = "trained_attention"
"""Config key for the kind of attention, its sizes and seed; for adapters, a file of that name."""
_PREFIX = f"{REVERSIBLE}_"


def reversible_type(model_type: str) -> str:
    """Return the model_type of reversible layers, which readers of the family must not open."""
    return f"{_PREFIX}{model_type}"


def is_as_trained(config: Mapping[str, Any]) -> bool:
    """Return True if a config.json belongs to an export with such code."""
    codes = config.get("auto_map")
    code = codes.get("AutoModelForCausalLM") if isinstance(codes, Mapping) else None
    return isinstance(code, str) and code.startswith(f"{CODE}.")


def as_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the same weights without the code; any other unchanged."""
    if not is_as_trained(config):
        return dict(config)
    plain = {key: value for key, value in config.items() if key not in ("auto_map", ATTENTION)}
    if isinstance(kind := config.get("model_type"), str):
        plain["model_type"] = kind.removeprefix(_PREFIX)
    return plain
