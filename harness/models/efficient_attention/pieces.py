"""Attention piece by piece: some queries of a document at a time, with the keys that they need.

Neither pass holds more than one piece's scores; between them lie queries, keys and values alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Piece:
    """Queries of a document that follow each other, and the keys that they are computed with."""

    queries: slice
    keys: torch.Tensor
    """(1, keys) int64: tokens of the document; or (heads, keys) if each head has its own."""

    @property
    def places(self) -> torch.Tensor:
        """The queries' tokens, (queries,) int64."""
        return torch.arange(self.queries.start, self.queries.stop, device=self.keys.device)


States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values."""


class Pattern(Protocol):
    """A rule for the keys that a query sees."""

    def pieces(self, query: torch.Tensor, key: torch.Tensor) -> Iterator[Piece]:
        """Yield the pieces of one document, (heads, tokens, head_dim) each."""

    def attend(self, piece: Piece, states: States, scale: float) -> torch.Tensor:
        """Return the output of a piece, (heads, queries, head_dim), of its queries, and of its keys
        and values, (key heads, or heads if each has its own, keys, head_dim).
        """


class ByPieces(torch.autograd.Function):
    """Attention within documents laid end to end."""

    @staticmethod
    def forward(
        context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: list[int],
        pattern: Pattern,
        scale: float,
    ) -> torch.Tensor:
        """(tokens, heads, head_dim) each -> (tokens, heads, head_dim); `bounds` of documents."""
        context.bounds, context.pattern, context.scale = bounds, pattern, scale
        context.save_for_backward(query, key, value)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for q, k, v, result in documents(bounds, query, key, value, output):
            for piece in pattern.pieces(q, k):
                keys = _heads(piece, len(k))
                parts = q[:, piece.queries], k[keys], v[keys]
                result[:, piece.queries] = pattern.attend(piece, parts, scale)
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of queries, keys and values, of their shapes."""
        states, pattern = context.saved_tensors, context.pattern
        # Many pieces add to the gradient of one key.
        sums = [torch.zeros(s.shape, dtype=torch.float32, device=s.device) for s in states]
        for q, k, v, due, *own in documents(context.bounds, *states, gradient, *sums):
            for piece in pattern.pieces(q, k):
                keys = _heads(piece, len(k))
                parts = _leaf(q[:, piece.queries]), _leaf(k[keys]), _leaf(v[keys])
                with torch.enable_grad():
                    output = pattern.attend(piece, parts, context.scale)
                gradients = torch.autograd.grad(output, parts, due[:, piece.queries])
                own[0][:, piece.queries] = gradients[0].float()
                for total, part in zip(own[1:], gradients[1:], strict=True):
                    total.index_put_(keys, part.float(), accumulate=True)
        return *(total.to(s.dtype) for total, s in zip(sums, states, strict=True)), *[None] * 3


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return attention to the keys that are `seen`, (queries, keys) bool."""
    key, value = (repeated(states, len(query)) for states in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, seen, scale=scale)


def repeated(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Return keys or values for every head that shares them."""
    return states.repeat_interleave(heads // len(states), 0)


def _leaf(part: torch.Tensor) -> torch.Tensor:
    return part.detach().requires_grad_()


def _heads(piece: Piece, key_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of a piece's keys, by head and token."""
    count = len(piece.keys)
    heads = torch.arange(max(count, key_heads), device=piece.keys.device)
    if count > 1:
        heads = heads * key_heads // count
    return heads[:, None], piece.keys


def documents(bounds: list[int], *states: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield each document's parts of (tokens, heads, head_dim), as (heads, tokens, head_dim)."""
    for start, stop in itertools.pairwise(bounds):
        yield [part[start:stop].transpose(0, 1) for part in states]
