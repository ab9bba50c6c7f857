"""A model's shape divided over tensor-parallel ranks, as its TensorPlan divides it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from harness.layout.box import Part
from harness.layout.shape import Shape
from harness.layout.tensor import TensorPlan
from harness.layout.tensors import Tensor


@lru_cache(maxsize=64)
def plan_of(shape: Shape) -> TensorPlan:
    """Return the plan of a model by its shape. Raises ValueError if its family has none."""
    return TensorPlan.make(shape.model_type, shape.num_heads, shape.num_kv_heads, shape.vocab_size)


def tensor_problems(shape: Shape, places: int, ranks: int | None = None) -> list[str]:
    """Return the reason why so many ranks cannot divide a model, and the numbers that can.

    `ranks`: that the other axes leave, which these numbers must divide, too; None for `places`.
    """
    problems = list(_problems(shape, places))
    if not problems:
        return []
    ranks = ranks or places
    most = max(places, shape.num_heads)
    legal = [n for n in range(1, most + 1) if not (ranks % n or any(_problems(shape, n)))]
    more = f" (and {len(problems) - 1} like it)" if len(problems) > 1 else ""
    return [f"{problems[0]}{more}: use {' or '.join(map(str, legal))}"]


def _problems(shape: Shape, places: int) -> Iterator[str]:
    if places == 1:
        return
    try:
        plan = plan_of(shape)
    except ValueError as error:
        yield str(error)
        return
    yield from plan.problems(places)
    for tensor in shape.tensors():
        try:
            plan.cut(tensor.name, tensor.shape, 0, places)
        except ValueError as error:
            yield str(error)


@lru_cache(maxsize=64)
def tensor_shard(shape: Shape, ranks: int) -> Shape:
    """Return the part of a model on each of `ranks` tensor-parallel ranks."""
    if ranks == 1:
        return shape
    plan, body = plan_of(shape), shape.body

    def cut(tensor: Tensor, prefix: str = "") -> Tensor:
        part = Part.of(tensor.shape)
        for dimension, ranges in plan.cut(prefix + tensor.name, tensor.shape, 0, ranks).items():
            part = part.cut(dimension, ranges)
        return replace(tensor, shape=part.shape)

    # Layers that are alike are one object, before and after; their numbers decide nothing.
    kinds = {id(layer): layer for layer in body.layers}
    parts = {
        kind: tuple(cut(tensor, f"{body.layer_prefix}0.") for tensor in layer)
        for kind, layer in kinds.items()
    }
    layers = tuple(parts[id(layer)] for layer in body.layers)
    heads = ranks if plan.divides_attention else 1
    return replace(
        shape,
        num_heads=shape.num_heads // heads,
        num_kv_heads=max(1, shape.num_kv_heads // heads),
        intermediate_size=shape.intermediate_size // ranks,
        expert_size=shape.expert_size // ranks,
        vocab_size=shape.vocab_size // ranks
        if plan.divides_vocabulary(ranks)
        else shape.vocab_size,
        body=replace(
            body,
            before=tuple(map(cut, body.before)),
            layers=layers,
            after=tuple(map(cut, body.after)),
        ),
    )


def divides_vocabulary(shape: Shape, ranks: int) -> bool:
    """Return True if each of `ranks` tensor-parallel ranks has a part of the logits alone."""
    return ranks > 1 and plan_of(shape).divides_vocabulary(ranks)
