"""Defects that the round trip must catch, planted one at a time around the real save and load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from harness.checkpoint.index import BUFFER, WEIGHT
from harness.checkpoint.reader import Reader
from tests.gates.checkpoints.cells import Cell, Side
from tests.gates.models import FROZEN

Change = Callable[[Callable[..., None], Reader, str, str, int, torch.Tensor], None]


@contextlib.contextmanager
def offset_off_by_one() -> Iterator[None]:
    """Pieces that do not begin a parameter are read one element too early."""

    def early(fill: Any, reader: Reader, name: str, kind: str, offset: int, out: Any) -> None:
        fill(reader, name, kind, max(0, offset - 1), out)

    with _filling(early):
        yield


@contextlib.contextmanager
def moments_left_out() -> Iterator[None]:
    """The moments stay the zeros that a new optimizer begins with."""

    def kept(fill: Any, reader: Reader, name: str, kind: str, offset: int, out: Any) -> None:
        if kind in (WEIGHT, BUFFER):
            fill(reader, name, kind, offset, out)

    with _filling(kept):
        yield


@contextlib.contextmanager
def moments_swapped() -> Iterator[None]:
    """Each moment is loaded into the other."""
    swap = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}

    def swapped(fill: Any, reader: Reader, name: str, kind: str, offset: int, out: Any) -> None:
        fill(reader, name, swap.get(kind, kind), offset, out)

    with _filling(swapped):
        yield


@contextlib.contextmanager
def masters_rounded() -> Iterator[None]:
    """The fp32 weights that the optimizer steps come from those that the model computes with."""

    def rounded(fill: Any, reader: Reader, name: str, kind: str, offset: int, out: Any) -> None:
        fill(reader, name, kind, offset, out)
        if kind == WEIGHT:
            out.copy_(out.bfloat16())

    with _filling(rounded):
        yield


@contextlib.contextmanager
def buffers_left_out() -> Iterator[None]:
    """Buffers stay as they were built."""

    def kept(fill: Any, reader: Reader, name: str, kind: str, offset: int, out: Any) -> None:
        if kind == BUFFER:
            out.zero_()
        else:
            fill(reader, name, kind, offset, out)

    with _filling(kept):
        yield


@contextlib.contextmanager
def step_forgotten() -> Iterator[None]:
    """Adam begins to count anew: its bias correction acts again."""
    with _restoring(optimizer={"step": 0.0}):
        yield


@contextlib.contextmanager
def scale_forgotten() -> Iterator[None]:
    """fp16 begins with the scale of the first step."""
    with _restoring(loss_scaling={}):
        yield


@contextlib.contextmanager
def tied_copy_forgotten() -> Iterator[None]:
    """The last stage's copy of a tied weight stays as it was built; nobody saves it."""
    with _places_without(lambda p: getattr(p, "ds_pipe_replicated", False)):
        yield


@contextlib.contextmanager
def frozen_forgotten() -> Iterator[None]:
    """Weights that no optimizer has are not loaded."""
    with _places_without(lambda p: not p.requires_grad):
        yield


@contextlib.contextmanager
def weights_stale() -> Iterator[None]:
    """Everything is loaded, but the model computes its first loss with what it had before."""
    from harness.engine import state

    with mock.patch.object(state, "refresh_weights"):
        yield


@contextlib.contextmanager
def _filling(change: Change) -> Iterator[None]:
    original = Reader.fill

    def fill(self: Reader, name: str, kind: str, offset: int, out: Any, *part: Any) -> None:
        change(lambda *args: original(*args, *part), self, name, kind, offset, out)

    from tests.gates.checkpoints import compare

    # What compares the two checkpoints must see them as they are.
    honest = mock.patch.object(compare, "whole", lambda *args: _honestly(original, *args))
    with mock.patch.object(Reader, "fill", fill), honest:
        yield


def _honestly(fill: Callable[..., None], reader: Reader, name: str, kind: str) -> torch.Tensor:
    with mock.patch.object(Reader, "fill", fill):
        return reader.whole(name, kind)


@contextlib.contextmanager
def _restoring(**sections: dict[str, Any]) -> Iterator[None]:
    from harness.engine import state

    original = state.restore_scalars

    def restore_scalars(engine: Any, saved: dict[str, dict[str, Any]]) -> None:
        original(engine, {**saved, **sections})

    with mock.patch.object(state, "restore_scalars", restore_scalars):
        yield


@contextlib.contextmanager
def _places_without(left_out: Callable[[Any], bool]) -> Iterator[None]:
    """While loading; a save still sees all."""
    from harness.engine import state

    original, restore = state.pieces, state.restore

    def places(*args: Any) -> Iterator[Any]:
        return (place for place in original(*args) if not left_out(place.parameter))

    def restoring(*args: Any) -> None:
        with mock.patch.object(state, "pieces", places):
            restore(*args)

    with mock.patch.object(state, "restore", restoring):
        yield


def _cell(precision: str, architecture: str, source: str, target: str) -> Cell:
    return Cell(precision, architecture, Side(source, 2), Side(target, 2))


DEFECTS: dict[str, tuple[Callable[[], Any], Cell]] = {
    "a fragment's offset off by one": (
        offset_off_by_one,
        _cell("fp32", "llama", "zero1", "zero3"),
    ),
    "moments not loaded": (moments_left_out, _cell("fp32", "llama", "zero1", "zero3")),
    "moments swapped": (moments_swapped, _cell("fp32", "llama", "zero1", "zero3")),
    "Adam's step not restored": (step_forgotten, _cell("fp32", "llama", "zero1", "zero3")),
    "masters read from bf16 weights": (
        masters_rounded,
        _cell("bf16", "llama_tied", "zero1", "zero1"),
    ),
    "weights not refreshed from the masters": (
        weights_stale,
        _cell("bf16", "llama_tied", "zero1", "zero1"),
    ),
    "the loss scale not restored": (scale_forgotten, _cell("fp16", "llama", "zero1", "zero3")),
    "the tied copy of a pipeline not loaded": (
        tied_copy_forgotten,
        _cell("fp32", "llama_tied", "zero1", "pipe2_zero1"),
    ),
    "frozen weights not loaded": (frozen_forgotten, _cell("fp32", FROZEN, "zero1", "zero3")),
    "buffers not loaded": (buffers_left_out, _cell("fp32", FROZEN, "zero1", "zero3")),
}
"""Each with a cell that it must show in."""


def planted(defect: str | None) -> contextlib.AbstractContextManager[None]:
    """The context in which a defect acts; None plants nothing."""
    return DEFECTS[defect][0]() if defect else contextlib.nullcontext()
