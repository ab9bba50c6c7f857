"""Defects of sequence parallelism."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch

from harness.layout.world import World
from harness.models import sequence
from harness.models.sequence import DividedRows
from tools.proofs.parity.defects.seams import losses_changed


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
