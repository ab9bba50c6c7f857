"""Defects of activations that are computed again, or wait on the host."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from typing import Any
from unittest import mock

import torch

from harness.layout.world import World
from harness.models import layer_changes, recompute
from harness.models.recompute import Buffers, HostCopy


class _Swapped(deque[Any]):
    """Results of which neighbours of one shape, an MLP's gate and up, change places."""

    def popleft(self) -> Any:
        first = super().popleft()
        both = [first, *itertools.islice(self, 1)]
        shapes = {x.shape if isinstance(x, torch.Tensor) else None for x in both}
        if len(both) == 2 and len(shapes) == 1 and None not in shapes:
            first, self[0] = self[0], first
        return first


def results_swapped(world: World) -> contextlib.AbstractContextManager[Any]:
    """A layer's backward pass takes kept results in another order."""
    return mock.patch.object(recompute, "deque", _Swapped)


def host_memory_reused(world: World) -> contextlib.AbstractContextManager[Any]:
    """All layers' inputs go to the same host memory."""
    memory: dict[Any, torch.Tensor] = {}
    make = HostCopy.__init__

    def shared(self: HostCopy, tensor: torch.Tensor, buffers: Buffers) -> None:
        make(self, tensor, buffers)
        self.copy = memory.setdefault((tensor.shape, tensor.dtype), self.copy).copy_(tensor)

    return mock.patch.object(HostCopy, "__init__", shared)


def tile_without_gradient(world: World) -> contextlib.AbstractContextManager[Any]:
    """Every third tile is taken for a constant."""
    count, checkpoint = itertools.count(), layer_changes.checkpoint

    def some(inner: Any, *inputs: torch.Tensor, use_reentrant: bool) -> Any:
        output = checkpoint(inner, *inputs, use_reentrant=use_reentrant)
        return output.detach() if next(count) % 3 == 0 else output

    return mock.patch.object(layer_changes, "checkpoint", some)
