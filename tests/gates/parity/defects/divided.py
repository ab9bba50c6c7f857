"""Defects of tensor, sequence and expert parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from harness.engine import build, expert, module, tensor
from harness.layout import grid
from harness.layout.world import World
from harness.models import sequence
from harness.models.sequence import DividedRows
from harness.models.vocabulary_loss import Vocabulary
from tests.gates.parity.defects.seams import losses_changed


@contextlib.contextmanager
def averaged_over_the_holders(world: World) -> Iterator[None]:
    """Gradients of experts are added up over the ranks that have the other ones."""
    import deepspeed
    from deepspeed.utils import groups

    def initialize(**kwargs: Any) -> Any:
        engine, *rest = original(**kwargs)
        engine.optimizer.expert_dp_process_group = {**groups._EXPERT_PARALLEL_GROUP}
        return engine, *rest

    original = deepspeed.initialize
    with mock.patch.object(deepspeed, "initialize", initialize):
        yield


@contextlib.contextmanager
def norm_of_own_experts(world: World) -> Iterator[None]:
    """The norm that clips has the squares of a rank's own experts alone."""
    from deepspeed.runtime.zero import stage3

    with mock.patch.object(stage3.pg_utils, "is_parallel", return_value=False):
        yield


def norm_of_one_tensor_rank(world: World) -> contextlib.AbstractContextManager[Any]:
    """The norm that clips has the squares of one tensor rank's part of every expert."""
    announce = expert.announce_experts

    def without_parts(model: Any, stage: int, experts: Any, replicas: Any, parts: Any) -> None:
        announce(model, stage, experts, replicas, experts)

    return mock.patch.object(expert, "announce_experts", without_parts)


def token_dropped(world: World) -> contextlib.AbstractContextManager[Any]:
    """Of every micro-batch, the first token does without its first expert."""

    def drop(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        kept = torch.ones_like(rows[:, :1])
        kept[0] = 0
        return reordered(rows, order) * kept

    reordered = expert.reordered
    return mock.patch.object(expert, "reordered", drop)


def rows_as_they_came(world: World) -> contextlib.AbstractContextManager[Any]:
    """Outputs are not put back in the order of the tokens."""
    return mock.patch.object(expert, "reordered", lambda rows, order: rows)


def documents_lost(world: World) -> contextlib.AbstractContextManager[Any]:
    """Attention over whole rows heeds no document."""
    make_masks = sequence.create_masks_for_generate

    def plain(*args: Any, position_ids: Any) -> Any:
        return make_masks(*args, position_ids=None)

    return mock.patch.object(sequence, "create_masks_for_generate", plain)


def parts_balanced(world: World) -> contextlib.AbstractContextManager[Any]:
    """A mixture balances the experts of each part of a row by itself."""
    return mock.patch.object(DividedRows, "balancing", contextlib.nullcontext)


def mean_of_own_targets(world: World) -> contextlib.AbstractContextManager[None]:
    """A rank's loss is the mean over its own target tokens times their number: not a number where
    its part of the rows has none.
    """

    def change(loss: torch.Tensor, balancing: Any, labels: torch.Tensor) -> Any:
        own = (labels.chunk(2, 1)[world.rank % 2] != -100).sum()
        return loss / own * own, balancing

    return losses_changed(change)


def positions_of_rank_0(world: World) -> contextlib.AbstractContextManager[Any]:
    """Every part of a row has the positions of the first."""
    keywords = DividedRows.keywords

    def first(rows: DividedRows, input_ids: Any, positions: Any) -> dict[str, Any]:
        whole = keywords(rows, input_ids, positions)
        part = whole["position_ids"].shape[1]
        return {**whole, "position_ids": positions[:, :part]}

    return mock.patch.object(DividedRows, "keywords", first)


def heads_in_another_order(world: World) -> contextlib.AbstractContextManager[Any]:
    """Ranks that share a key head get those of their neighbours."""

    def tiled(heads: torch.Tensor, copies: int, dimension: int) -> torch.Tensor:
        return torch.cat([heads] * copies, dimension)

    return mock.patch.object(torch.Tensor, "repeat_interleave", tiled)


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
