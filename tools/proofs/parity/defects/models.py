"""Defects in the model that is built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from harness.layout.world import World
from harness.models import varlen
from harness.models.pieces import decoder_layers
from tools.proofs.parity.defects.seams import (
    Planted,
    model_config_with,
)


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
