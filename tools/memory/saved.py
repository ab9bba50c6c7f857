"""Measures the tensors that autograd saves between a forward and its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


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


@contextmanager
def saved_by(model: nn.Module) -> Iterator[Saved]:
    """Notes what a forward pass of `model` saves in the body, parameters and buffers left out.

    Real tensors and fake ones.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved = Saved()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved.add(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
