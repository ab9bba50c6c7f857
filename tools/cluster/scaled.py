"""A model's larger and smaller relatives: the same family, wider and deeper by one factor."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from harness.layout.shape import Shape


def scaled(config: Mapping[str, Any], factor: float) -> dict[str, int]:
    """Return the keys to change in a Hugging Face config for a model whose width and depth are so
    many times as large.

    Heads keep their size, experts their number, and so do key heads that several query heads share;
    parameters grow with about the third power of the factor.
    """
    shape = Shape.from_hf(config)
    family, shares = shape.family, shape.num_kv_heads < shape.num_heads
    step = shape.num_kv_heads if shares else 1
    heads = step * max(1, round(factor * shape.num_heads / step))
    width = heads / shape.num_heads
    sizes = {
        "heads": heads,
        "hidden": _multiple(shape.hidden_size * width, shape.hidden_size // shape.num_heads),
        "width": _multiple(shape.intermediate_size * width, 64),
        "layers": max(1, round(shape.num_layers * factor)),
    }
    keys = {family.size_keys(name)[0]: size for name, size in sizes.items()}
    if not shares:
        keys |= {key: heads for key in family.size_keys("kv_heads") if key in config}
    if shape.num_experts and shape.expert_size != shape.intermediate_size:
        keys["moe_intermediate_size"] = _multiple(shape.expert_size * width, 64)
    if family.mlp_ratio:  # four times the hidden size, whatever that is
        keys.pop(family.size_keys("width")[0])
    return keys


def _multiple(size: float, of: int) -> int:
    return of * ceil(size / of - 1e-9)
