"""Sums within layers, added up in the blocks that ranks with a part of each weight compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from harness.layout import tensor as styles
from harness.layout.box import Range
from harness.layout.tensor import TensorPlan

Forward = Callable[[torch.Tensor], torch.Tensor]
T = TypeVar("T")


def sum_in_blocks(model: nn.Module, config: Mapping[str, Any], blocks: int, first: int) -> None:
    """Let the layers that `blocks` tensor-parallel ranks divide add up as many products, each of
    what one of them has and the `first` of them first: rounding then takes place where theirs does.
    In place.

    Forward that is where a weight is divided by its inputs, backward where by its outputs.
    """
    plan = TensorPlan.of(config)
    for name, module in model.named_modules():
        style = plan.style_of(name)
        if "gate_up_proj" in module._parameters:
            module.forward = functools.partial(_experts, module, blocks, first)  # type: ignore[method-assign]
        elif style in styles.ROWS:
            module.forward = _by_inputs(module, plan, name, blocks, first)
        elif style in (*styles.COLUMNS, styles.GATHERED, styles.HEAD):
            module.forward = _by_outputs(module, plan, name, blocks)


def _parts(module: Any, plan: TensorPlan, name: str, blocks: int) -> list[tuple[int, torch.Tensor]]:
    """Return the dimension and the indices of each rank's part of a weight, none of them twice: all
    parts together are the weight, or the loop would compute what the ranks do, be it wrong.
    """
    every: dict[tuple[Range, ...], int] = {}
    shape = tuple(module.weight.shape)
    for place in range(blocks):
        for dimension, ranges in plan.cut(f"{name}.weight", shape, place, blocks).items():
            every[ranges] = dimension
    parts = [
        (dimension, torch.cat([torch.arange(start, stop) for start, stop in ranges]))
        for ranges, dimension in every.items()
    ]
    if parts:
        together = torch.cat([chosen for _, chosen in parts]).sort().values
        assert torch.equal(together, torch.arange(shape[parts[0][0]])), f"{name} is cut unevenly"
    return parts


def _by_inputs(module: Any, plan: TensorPlan, name: str, blocks: int, first: int) -> Forward:
    parts = _from(first, _parts(module, plan, name, blocks))

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        products = [
            _linear(module, inputs[..., chosen], module.weight.index_select(dimension, chosen))
            for dimension, chosen in parts
        ]
        total = _added(products)
        return total if module.bias is None else total + module.bias

    return forward


def _by_outputs(module: Any, plan: TensorPlan, name: str, blocks: int) -> Forward:
    parts = _parts(module, plan, name, blocks)
    if not parts:  # a vocabulary that does not divide
        return module.forward  # type: ignore[no-any-return]
    places = torch.cat([chosen for _, chosen in parts]).argsort()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        outputs = [
            _linear(
                module,
                inputs,
                module.weight.index_select(dimension, chosen),
                None if module.bias is None else module.bias[chosen],
            )
            for dimension, chosen in parts
        ]
        return torch.cat(outputs, -1)[..., places]

    return forward


def _linear(
    module: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the module computes it: transformers' Conv1D has its weight the other way round."""
    return functional.linear(inputs, weight if isinstance(module, nn.Linear) else weight.t(), bias)


def _from(first: int, parts: list[T]) -> list[T]:
    """Return the parts from the `first` on, and then those before it."""
    return [*parts[first:], *parts[:first]]


def _experts(module: Any, blocks: int, first: int, *args: torch.Tensor) -> torch.Tensor:
    halves = [half.chunk(blocks, 1) for half in module.gate_up_proj.chunk(2, 1)]
    weights = [
        {"gate_up_proj": torch.cat(both, 1), "down_proj": down}
        for *both, down in zip(*halves, module.down_proj.chunk(blocks, 2), strict=True)
    ]
    in_blocks = module.__dict__.pop("forward")
    try:
        outputs = [torch.func.functional_call(module, each, args) for each in weights]
    finally:
        module.forward = in_blocks
    return _added(_from(first, outputs))


@torch.library.custom_op("parity::added", mutates_args=())
def _added(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add up parts as ranks exchange them: no compiler can leave the sum unrounded for what
    follows.
    """
    return functools.reduce(torch.add, parts).clone()


@_added.register_fake
def _(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(parts[0])


def _note_parts(ctx: Any, inputs: tuple[list[torch.Tensor]], output: torch.Tensor) -> None:
    ctx.parts = len(inputs[0])


def _to_each(ctx: Any, gradient: torch.Tensor) -> list[torch.Tensor]:
    return [gradient] * ctx.parts


_added.register_autograd(_to_each, setup_context=_note_parts)
