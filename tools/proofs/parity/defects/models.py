"""Defects in the model that is built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from harness.layout.world import World
from harness.models.pieces import decoder_layers
from tools.proofs.parity.defects.seams import (
    Planted,
    model_config_with,
)


@contextlib.contextmanager
def document_mask_dropped(world: World) -> Iterator[None]:
    """Tokens attend across document boundaries; positions stay right."""
    finder = "transformers.masking_utils.find_packed_sequence_indices"
    with mock.patch(finder, return_value=None):
        yield


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
def other_seed(world: World) -> Iterator[None]:
    """Weights are drawn from another seed."""
    from harness.models import initialize

    original = initialize.draw
    with mock.patch.object(initialize, "draw", lambda m, piece, seed: original(m, piece, seed + 1)):
        yield
