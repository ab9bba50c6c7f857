"""Defects of tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import nn

from harness.engine import build, module, tensor
from harness.layout import grid
from harness.layout.world import World
from harness.models.vocabulary_loss import Vocabulary


def gradients_not_summed(world: World) -> contextlib.AbstractContextManager[Any]:
    """Norms of queries and keys keep this rank's part of the gradient: no sum over ranks."""
    return mock.patch.object(tensor, "_sum_gradients")


def inputs_not_summed(world: World) -> contextlib.AbstractContextManager[Any]:
    """The gradient that goes on from divided weights is this rank's part alone."""
    return mock.patch.object(tensor, "copied", lambda states, group: states)


def norm_of_every_copy(world: World) -> contextlib.AbstractContextManager[Any]:
    """A parameter that all ranks have counts once for each of them."""

    def mark_all(module: nn.Module, _: Any) -> None:
        parameter: Any
        for parameter in module.parameters():
            parameter.is_copy, parameter.tensor_model_parallel = False, True

    return mock.patch.object(build, "note_copies", mark_all)


def vocabulary_off_by_one(world: World) -> contextlib.AbstractContextManager[Any]:
    """A rank takes its logits for those of the ids that are one higher."""

    def one_higher(first: int, *rest: Any) -> Vocabulary:
        return Vocabulary(first + 1, *rest)

    return mock.patch.object(tensor, "Vocabulary", one_higher)


def loss_of_every_tensor_rank(world: World) -> contextlib.AbstractContextManager[Any]:
    """Ranks with the same tokens add up their losses."""
    return mock.patch.dict(grid.GROUPS, loss=())


def dropout_of_every_rank(world: World) -> contextlib.AbstractContextManager[Any]:
    """Ranks with the same hidden states each drop others of them."""
    return mock.patch.dict(grid.GROUPS, dropout=(*grid.GROUPS["dropout"], "tensor"))


@contextlib.contextmanager
def heads_undivided(world: World) -> Iterator[None]:
    """An attention module views its part of the width as all heads of half as many tokens."""
    divide = module.divide_forward

    def divide_all_but_heads(model: nn.Module, *rest: Any) -> None:
        heads = [(m, m.num_heads) for m in model.modules() if hasattr(m, "num_heads")]
        divide(model, *rest)  # type: ignore[arg-type]
        for attention, number in heads:
            attention.num_heads = number

    with mock.patch.object(module, "divide_forward", divide_all_but_heads):
        yield


@contextlib.contextmanager
def padding_learned(world: World) -> Iterator[None]:
    """The row of the padding id is trained as any other."""
    embedding = tensor._embedding

    def without(module: Any, group: Any) -> Any:
        padding, module.padding_idx = module.padding_idx, None
        try:
            return embedding(module, group)
        finally:
            module.padding_idx = padding

    with mock.patch.object(tensor, "_embedding", without):
        yield


@contextlib.contextmanager
def bias_added_everywhere(world: World) -> Iterator[None]:
    """Every rank adds the whole bias to its part of a sum."""
    linear = tensor._linear

    def biased(module: Any, inputs: Any, bias: Any) -> Any:
        return linear(module, inputs, module.bias)

    with mock.patch.object(tensor, "_linear", biased):
        yield
