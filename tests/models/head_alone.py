"""A model's output head and loss by themselves, and the bytes that they need."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.models.chunked_loss import ChunkedLoss
from harness.models.logits import Operations


class Peak(TorchDispatchMode):
    """Follows the bytes of the storages that are made within it, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most = 0, 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self._count((args, kwargs), made=False)
        output = function(*args, **(kwargs or {}))
        self._count(output, made=True)
        return output

    def _count(self, tensors: Any, made: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    size = self._sizes[storage._cdata] = storage.nbytes() if made else 0
                    self.live += size
                    weakref.finalize(storage, self._drop, storage._cdata)
        self.most = max(self.most, self.live)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


class HeadAlone:
    """A head, its input and labels: all that the loss is computed of."""

    def __init__(
        self,
        tokens: int,
        hidden: int,
        vocab: int,
        chunk: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        operations: Operations = (),
    ) -> None:
        self.head = nn.Linear(hidden, vocab, bias=False, device=device, dtype=dtype)
        self.model: Any = nn.Module()
        self.model.get_output_embeddings = lambda: self.head
        self.loss = ChunkedLoss(self.model, chunk, operations)
        self.hidden = torch.zeros(1, tokens, hidden, device=device, dtype=dtype)
        self.hidden.requires_grad_()
        self.labels = torch.zeros(1, tokens, dtype=torch.int64, device=device)

    def run(self, trains: bool = True) -> None:
        """Forward pass, and backward pass."""
        with self.loss.of(self.labels, 0.0), torch.set_grad_enabled(trains):
            output = self.head(self.hidden)
        loss = self.loss.taken(output)
        if trains:
            loss.backward()
