"""Defects of the loss in chunks of the vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from harness.engine import build
from harness.layout.world import World
from harness.models import chunked_loss


def last_chunk_dropped(world: World) -> contextlib.AbstractContextManager[Any]:
    """The last chunk takes no part in the loss, and its rows of the head have no gradient."""
    columns = chunked_loss._How.columns

    def without_last(self: Any, vocab_size: int) -> Iterator[slice]:
        return iter([*columns(self, vocab_size)][:-1])

    return mock.patch.object(chunked_loss._How, "columns", without_last)


def summand_overwritten(world: World) -> contextlib.AbstractContextManager[Any]:
    """The hidden states' gradient is that of the last chunk, not the sum over all."""

    def overwrite(total: torch.Tensor, slope: torch.Tensor, weight: torch.Tensor) -> None:
        total.copy_(slope @ weight)

    return mock.patch.object(chunked_loss, "_add_summand", overwrite)


def logits_as_the_head_gives_them(world: World) -> contextlib.AbstractContextManager[Any]:
    """Logits of chunks are neither capped nor scaled."""
    return mock.patch.object(build, "operations_on_logits", return_value=())
