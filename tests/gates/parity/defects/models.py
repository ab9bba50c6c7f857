"""Defects in the model that is built, and in what is computed again."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from harness.layout.world import World
from harness.models import layer_changes, recompute, varlen
from harness.models.pieces import decoder_layers
from harness.models.recompute import Buffers, HostCopy
from tests.gates.parity.defects.seams import Planted, model_config_with


@contextlib.contextmanager
def document_mask_dropped(world: World) -> Iterator[None]:
    """Tokens attend across document boundaries; positions stay right."""
    with mock.patch("harness.models.attention._numbered", return_value=None):
        yield


def bounds_late(world: World) -> contextlib.AbstractContextManager[Any]:
    """Every document begins one token late."""
    in_turn = varlen._in_turn

    def late(q: Any, k: Any, v: Any, bounds: torch.Tensor, *more: Any, **how: Any) -> Any:
        bounds = torch.cat([bounds[:1], bounds[1:-1] + 1, bounds[-1:]])
        return in_turn(q, k, v, bounds, *more, **how)

    return mock.patch.object(varlen, "_in_turn", late)


def windows_lost(world: World) -> contextlib.AbstractContextManager[Any]:
    """Attention by bounds sees whole documents where a layer has a window."""
    in_turn = varlen._in_turn

    def wide(*states: Any, before: int, **how: Any) -> Any:
        return in_turn(*states, before=-1, **how)

    return mock.patch.object(varlen, "_in_turn", wide)


def key_ignored(name: str, value: Any = None) -> Planted:
    """A key of the model's file does not reach the model."""

    def change(values: dict[str, Any]) -> None:
        assert values.pop(name, value) != value
        if value is not None:
            values[name] = value

    return lambda world: model_config_with(change)


@contextlib.contextmanager
def layers_swapped(world: World) -> Iterator[None]:
    """The first stage runs its first two layers in the wrong order."""
    from harness.models.stage import Stage

    def forward(self: Any, inputs: Any) -> Any:
        first, second, *_ = decoder_layers(self.model)[1]
        if self.enter is not None:
            return original(self, inputs)
        with (
            mock.patch.object(first, "forward", second.forward),
            mock.patch.object(second, "forward", first.forward),
        ):
            return original(self, inputs)

    original = Stage.forward
    with mock.patch.object(Stage, "forward", forward):
        yield


@contextlib.contextmanager
def tied_gradients_apart(world: World) -> Iterator[None]:
    """Each end of the pipeline keeps its own part of a tied weight's gradient."""
    from harness.engine.deepspeed_0_19.pipe_module import StageModule

    with mock.patch.object(StageModule, "get_tied_weights_and_groups", return_value=[]):
        yield


@contextlib.contextmanager
def tied_gradients_of_all_ranks(world: World) -> Iterator[None]:
    """A tied weight's gradient is summed over the other tensor ranks' parts, too."""
    from harness.engine.deepspeed_0_19.pipe_module import StageModule

    def every_rank(module: Any) -> Any:
        return [(weight, dist.group.WORLD) for weight, _ in module._tied]

    with mock.patch.object(StageModule, "get_tied_weights_and_groups", every_rank):
        yield


@contextlib.contextmanager
def other_seed(world: World) -> Iterator[None]:
    """Weights are drawn from another seed."""
    from harness.models import initialize

    original = initialize.draw
    with mock.patch.object(initialize, "draw", lambda m, piece, seed: original(m, piece, seed + 1)):
        yield


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
