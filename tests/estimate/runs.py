"""Inputs of an estimate, from a model and the settings that differ from an empty JSON."""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from harness.config.ds_json import value_of
from harness.estimate.inputs import Inputs, ZeroSettings
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from harness.layout.stages import Bounds
from harness.plan.model_config import find_model_config

_OWN = {field.name for field in fields(Inputs)} - {"stage"}


def run_of(
    model: str | Mapping[str, Any] = "tiny",
    precision: str = "bf16",
    ranks: int = 2,
    bounds: Bounds | None = None,
    **keys: Any,
) -> Inputs:
    """Return the inputs of a preset or a config; other keywords are JSON keys by last part."""
    own = {name: keys.pop(name) for name in [*keys] if name in _OWN}
    ds = {"type": "AdamW", **keys}
    small = {"micro_batch": 1, "seq_len": 128, "grad_accum": 1}
    return Inputs(
        shape=Shape.from_hf(find_model_config(model)[0] if isinstance(model, str) else model),
        zero=ZeroSettings.read(partial(_default_value, **ds)),
        precision=precision,
        bounds=bounds,
        **{"grid": Grid(ranks, pipeline=len(bounds) - 1 if bounds else 1), **small, **own},
    )


def _default_value(key: str, **changes: Any) -> Any:
    """Return DeepSpeed's defaults for an empty JSON."""
    return changes.get(key.rpartition(".")[2], value_of({}, key))
