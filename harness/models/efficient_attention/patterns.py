"""Patterns of exact attention to part of the past, and to summaries of it.

Each query uses the softmax of plain attention over fewer keys, at or before its own position. A
pattern never looks at later tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from harness.models.efficient_attention.pieces import Piece, States, masked, repeated

_QUERIES = (64, 512)
"""Minimum and maximum number of queries per piece, if the pattern does not determine it."""


@dataclass(frozen=True)
class Longformer:
    """Sliding window and global tokens (arXiv 2004.05150, section 3.1): token i sees j <= i with

        i - j < window  or  j < first.

    The global tokens are the first ones of a document, which every token sees: attention sinks
    (StreamingLLM, arXiv 2309.17453, section 3.2). Like every token of a decoder they see only the
    past. They have no separate projections, which would be parameters that the model lacks.
    """

    window: int
    first: int

    def pieces(self, query: torch.Tensor, _key: torch.Tensor) -> Iterator[Piece]:
        """See `Pattern`."""
        tokens, device = query.shape[1], query.device
        for queries in _in_turn(tokens, min(max(self.window, _QUERIES[0]), _QUERIES[1])):
            near = max(0, queries.start - self.window + 1)
            far = torch.arange(min(self.first, near), device=device)
            keys = torch.cat([far, torch.arange(near, queries.stop, device=device)])
            yield Piece(queries, keys[None])

    def attend(self, piece: Piece, states: States, scale: float) -> torch.Tensor:
        """See `Pattern`."""
        query, key, value = states
        distance = piece.places[:, None] - piece.keys
        seen = (distance >= 0) & ((distance < self.window) | (piece.keys < self.first))
        return masked(query, key, value, seen, scale)


@dataclass(frozen=True)
class Strided:
    """The strided pattern of Sparse Transformers (arXiv 1904.10509, section 4.3), both parts in one
    softmax ("merged heads"): token i sees j <= i with

        i - j < stride  or  (i - j) mod stride = 0.

    If the stride is near the square root of the length, time grows as length ** 1.5.
    """

    stride: int

    def pieces(self, query: torch.Tensor, _key: torch.Tensor) -> Iterator[Piece]:
        """See `Pattern`."""
        for queries in _in_turn(query.shape[1], self.stride):
            yield Piece(queries, torch.arange(queries.stop, device=query.device)[None])

    def attend(self, piece: Piece, states: States, scale: float) -> torch.Tensor:
        """See `Pattern`."""
        query, key, value = states
        heads, count, width = query.shape
        key, value = (repeated(part, heads) for part in (key, value))
        start = piece.queries.start  # a multiple of the stride
        near = max(0, start - self.stride)
        distance = piece.places[:, None] - piece.keys[0, near:]
        seen = (distance >= 0) & (distance < self.stride)
        scores = (query @ key[:, near:].mT).masked_fill(~seen, -torch.inf)
        # Query r of the piece sees token r of every earlier stride: (heads, strides, count, width).
        far_keys, far_values = (
            part[:, :start].view(heads, -1, self.stride, width)[:, :, :count]
            if start
            else part.new_empty(heads, 0, count, width)
            for part in (key, value)
        )
        far = torch.einsum("hqd,hsqd->hqs", query, far_keys)
        weights = (torch.cat([far, scores], -1) * scale).softmax(-1)
        far, scores = weights.split([far.shape[-1], scores.shape[-1]], -1)
        output: torch.Tensor = scores @ value[:, near:]
        return output + torch.einsum("hqs,hsqd->hqd", far, far_values)


@dataclass(frozen=True)
class Linformer:
    """Keys and values projected along the sequence (arXiv 2006.04768, section 4), made causal: a
    token sees the tokens of its own block up to itself, and `summaries` of each earlier block:

        softmax(q [E K; K_own]^T) [E V; V_own],  E: means over block / summaries tokens.

    Mean pooling is one of the paper's projections; learned ones would be parameters that the model
    lacks. Projecting the whole sequence at once would leak the future. Every block has the same
    number of summaries, so time falls by block / summaries but remains quadratic.
    """

    block: int
    summaries: int

    def pieces(self, query: torch.Tensor, _key: torch.Tensor) -> Iterator[Piece]:
        """See `Pattern`."""
        for queries in _in_turn(query.shape[1], self.block):
            yield Piece(queries, torch.arange(queries.stop, device=query.device)[None])

    def attend(self, piece: Piece, states: States, scale: float) -> torch.Tensor:
        """See `Pattern`."""
        query, key, value = states
        start, count = piece.queries.start, query.shape[1]
        key, value = (
            torch.cat([self._means(part[:, :start]), part[:, start:]], 1) for part in (key, value)
        )
        seen = torch.ones(count, key.shape[1], dtype=torch.bool, device=query.device)
        return masked(query, key, value, seen.tril(key.shape[1] - count), scale)

    def _means(self, states: torch.Tensor) -> torch.Tensor:
        """Return the summaries of (heads, tokens, head_dim); tokens is a multiple of the block."""
        heads, tokens, width = states.shape
        each = self.block // self.summaries
        return states.reshape(heads, tokens // each, each, width).mean(2)


def _in_turn(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))
