"""Attention in pieces: some queries of a document at a time, with the keys they need.

Neither pass holds the scores of more than one piece; only queries, keys and values are kept
between.
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
    """Consecutive queries of a document, and the keys that they attend to."""

    queries: slice
    keys: torch.Tensor
    """(1, keys) int64: token indices in the document; or (heads, keys) if they differ per head."""

    @property
    def places(self) -> torch.Tensor:
        """Token indices of the queries, (queries,) int64."""
        return torch.arange(self.queries.start, self.queries.stop, device=self.keys.device)


States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values."""


class Pattern(Protocol):
    """A rule that determines the keys a query sees."""

    def pieces(self, query: torch.Tensor, key: torch.Tensor) -> Iterator[Piece]:
        """Yield the pieces of one document; arguments (heads, tokens, head_dim)."""

    def attend(self, piece: Piece, states: States, scale: float) -> torch.Tensor:
        """Return the output of a piece, (heads, queries, head_dim), from its queries and from its
        keys and values, (key heads, or heads if they differ per head; keys; head_dim).
        """


class ByPieces(torch.autograd.Function):
    """Attention within concatenated documents."""

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
        """Return the gradients of queries, keys and values, in their shapes."""
        states, pattern = context.saved_tensors, context.pattern
        # Several pieces contribute to the gradient of one key.
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
    """Return attention to the keys where `seen`, (queries, keys) bool, is True."""
    key, value = (repeated(states, len(query)) for states in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, seen, scale=scale)


def repeated(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Return keys or values repeated for every head that shares them."""
    return states.repeat_interleave(heads // len(states), 0)


def _leaf(part: torch.Tensor) -> torch.Tensor:
    return part.detach().requires_grad_()


def _heads(piece: Piece, key_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the head and token indices of a piece's keys."""
    count = len(piece.keys)
    heads = torch.arange(max(count, key_heads), device=piece.keys.device)
    if count > 1:
        heads = heads * key_heads // count
    return heads[:, None], piece.keys


def documents(bounds: list[int], *states: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield each document's slices of (tokens, heads, head_dim), as (heads, tokens, head_dim)."""
    for start, stop in itertools.pairwise(bounds):
        yield [part[start:stop].transpose(0, 1) for part in states]
