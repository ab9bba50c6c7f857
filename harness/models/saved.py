"""Measures the tensors that autograd saves between a forward and its backward pass."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from harness.models.host_copies import HostCopy
from harness.models.recompute import Reuse
from harness.models.reversible import Streams


class Saved:
    """The storages that were saved, each once; alive, so that no other gets the id of one."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that was not counted before."""
        self._storages[storage._cdata] = storage

    @property
    def bytes(self) -> int:
        """All of them together."""
        return sum(storage.nbytes() for storage in self._storages.values())


def _of_checkpoints() -> Iterator[torch.Tensor]:
    """Yield the tensors that checkpointed layers keep out of autograd's sight."""
    for thing in gc.get_objects():
        if type(thing) is HostCopy:
            yield thing.copy
        elif type(thing) is Streams:
            yield from thing.kept or ()
        elif type(thing) is Reuse:
            yield from (x for x in tree_leaves([*thing.results]) if isinstance(x, torch.Tensor))


@contextmanager
def saved_by(model: nn.Module) -> Iterator[Saved]:
    """Notes what a forward pass of `model` saves in the body, parameters and buffers left out; its
    loss has to outlive the body. Real tensors and fake ones.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved, before = Saved(), {id(tensor) for tensor in _of_checkpoints()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved.add(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
    for tensor in _of_checkpoints():
        if id(tensor) not in before:
            saved.add(tensor.untyped_storage())
