"""Defects that the round trip must catch, planted one at a time in the real save and load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from harness.checkpoint.index import BUFFER, WEIGHT
from harness.checkpoint.reader import Reader
from tests.gates.checkpoints import compare
from tests.gates.checkpoints.cells import Cell, Side
from tests.gates.models import FROZEN

Fill = Callable[[str, str, int, torch.Tensor], None]
"""Reads a tensor, given its name, kind and offset, into a tensor."""


@contextlib.contextmanager
def _filling(change: Callable[[Fill, str, str, int, Any], None]) -> Iterator[None]:
    original = Reader.fill

    def fill(self: Reader, name: str, kind: str, offset: int, out: Any, *part: Any) -> None:
        change(lambda *args: original(self, *args, *part), name, kind, offset, out)

    def honestly(reader: Reader, name: str, kind: str) -> torch.Tensor:
        with mock.patch.object(Reader, "fill", original):
            return reader.whole(name, kind)

    # The comparison must see the true values.
    with mock.patch.object(Reader, "fill", fill), mock.patch.object(compare, "whole", honestly):
        yield


def _masters_rounded(fill: Fill, name: str, kind: str, offset: int, out: Any) -> None:
    fill(name, kind, offset, out)
    if kind == WEIGHT:
        out.copy_(out.bfloat16())


def _buffers_left_out(fill: Fill, name: str, kind: str, offset: int, out: Any) -> None:
    if kind == BUFFER:
        out.zero_()
    else:
        fill(name, kind, offset, out)


def _restoring(**sections: dict[str, Any]) -> AbstractContextManager[Any]:
    from harness.engine import state

    original = state.restore_scalars

    def restore_scalars(engine: Any, saved: dict[str, dict[str, Any]]) -> None:
        original(engine, {**saved, **sections})

    return mock.patch.object(state, "restore_scalars", restore_scalars)


def _loading_without(left_out: Callable[[Any], bool]) -> AbstractContextManager[Any]:
    """Return a context in which loading, but not saving, leaves out some parameters."""
    from harness.engine import state

    original, restore = state.pieces, state.restore

    def places(*args: Any) -> Iterator[Any]:
        return (place for place in original(*args) if not left_out(place.parameter))

    def restoring(*args: Any) -> None:
        with mock.patch.object(state, "pieces", places):
            restore(*args)

    return mock.patch.object(state, "restore", restoring)


_SWAP = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
# fmt: off
_PLANTS: dict[str, tuple[tuple[str, ...], Any]] = {
    # Fragments that do not begin a parameter are read one element too early.
    "a fragment's offset off by one": (("fp32", "llama", "zero1", "zero3"), lambda: _filling(
        lambda fill, name, kind, offset, out: fill(name, kind, max(0, offset - 1), out))),
    "moments not loaded": (("fp32", "llama", "zero1", "zero3"), lambda: _filling(
        lambda fill, name, kind, *rest: (kind in (WEIGHT, BUFFER) and fill(name, kind, *rest)))),
    "moments swapped": (("fp32", "llama", "zero1", "zero3"), lambda: _filling(
        lambda fill, name, kind, *rest: fill(name, _SWAP.get(kind, kind), *rest))),
    "Adam's step not restored": (("fp32", "llama", "zero1", "zero3"), lambda: _restoring(
        optimizer={"step": 0.0})),
    "masters read from bf16 weights": (("bf16", "llama_tied", "zero1", "zero1"), lambda: _filling(
        _masters_rounded)),
    # The model computes its first loss with its previous weights.
    "weights not refreshed from the masters": (
        ("bf16", "llama_tied", "zero1", "zero1"), lambda: mock.patch(
            "harness.engine.state.refresh_weights")),
    "the loss scale not restored": (("fp16", "llama", "zero1", "zero3"), lambda: _restoring(
        loss_scaling={})),
    # No layout saves it.
    "the tied copy of a pipeline not loaded": (
        ("fp32", "llama_tied", "zero1", "pipe2_zero1"), lambda: _loading_without(
            lambda parameter: getattr(parameter, "ds_pipe_replicated", False))),
    "frozen weights not loaded": (("fp32", FROZEN, "zero1", "zero3"), lambda: _loading_without(
        lambda parameter: not parameter.requires_grad)),
    "buffers not loaded": (("fp32", FROZEN, "zero1", "zero3"), lambda: _filling(_buffers_left_out)),
}
# fmt: on
DEFECTS = {
    name: (plant, Cell(precision, architecture, Side(source, 2), Side(target, 2)))
    for name, ((precision, architecture, source, target), plant) in _PLANTS.items()
}
"""Each defect with a cell in which it must show."""


def planted(defect: str | None) -> AbstractContextManager[None]:
    """Return the context in which a defect is active; None plants nothing."""
    return DEFECTS[defect][0]() if defect else contextlib.nullcontext()
