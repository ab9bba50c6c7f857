"""Patterns of attention to part of the past, or to summaries of it, piece by piece.

Each query uses the softmax of plain attention over fewer keys, at or before its own position. A
piece is some queries of a document with the keys they need. Neither pass holds the scores of more
than one piece; only queries, keys and values are kept between.
"""

from __future__ import annotations  # exports are opened by older Pythons, too

import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

_LEAST, _MOST = 64, 512  # queries per piece, if the pattern does not determine it
_ROUNDS = 2  # of hashing


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


@dataclass(frozen=True)
class Blocks:
    """Pieces of `block` queries, each with every key up to its last query."""

    block: int

    def pieces(self, query: torch.Tensor, _key: torch.Tensor) -> Iterator[Piece]:
        """See `Pattern`."""
        for queries in slices(query.shape[1], self.block):
            yield Piece(queries, torch.arange(queries.stop, device=query.device)[None])


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


def slices(tokens: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` tokens; the last may be shorter."""
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


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
        for queries in slices(tokens, min(max(self.window, _LEAST), _MOST)):
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


class Strided(Blocks):
    """The strided pattern of Sparse Transformers (arXiv 1904.10509, section 4.3), both parts in one
    softmax ("merged heads"), with the block as stride: token i sees j <= i with

        i - j < block  or  (i - j) mod block = 0.

    If the block is near the square root of the length, time grows as length ** 1.5.
    """

    def attend(self, piece: Piece, states: States, scale: float) -> torch.Tensor:
        """See `Pattern`."""
        query, key, value = states
        heads, count, width = query.shape
        key, value = (repeated(part, heads) for part in (key, value))
        start = piece.queries.start  # a multiple of the block
        near = max(0, start - self.block)
        distance = piece.places[:, None] - piece.keys[0, near:]
        seen = (distance >= 0) & (distance < self.block)
        scores = (query @ key[:, near:].mT).masked_fill(~seen, -torch.inf)
        # Query r of the piece sees token r of every earlier block: (heads, blocks, count, width).
        far_keys, far_values = (
            part[:, :start].view(heads, -1, self.block, width)[:, :, :count]
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
class Linformer(Blocks):
    """Keys and values projected along the sequence (arXiv 2006.04768, section 4), made causal: a
    token sees the tokens of its own block up to itself, and `summaries` of each earlier block:

        softmax(q [E K; K_own]^T) [E V; V_own],  E: means over block / summaries tokens.

    Mean pooling is one of the paper's projections; learned ones would be parameters that the model
    lacks. Projecting the whole sequence at once would leak the future. Every block has the same
    number of summaries, so time falls by block / summaries but remains quadratic.
    """

    summaries: int

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


@dataclass(frozen=True)
class Reformer:
    """Locality-sensitive hashing (Reformer, arXiv 2001.04451, section 2): a token sees the tokens
    of its own bucket, in either of two rounds of

        h(x) = argmax([x R; -x R]),  R (head_dim, buckets / 2) normal,

    and itself. Unlike the paper, queries and keys are hashed separately, since a decoder has both
    (the paper shares them), and a token sees the latest `window` keys of its bucket up to itself.
    The paper sorts by bucket and divides into chunks, whose bounds depend on later tokens.
    """

    buckets: int
    window: int
    seed: int
    layer: int

    def pieces(self, query: torch.Tensor, key: torch.Tensor) -> Iterator[Piece]:
        """See `Pattern`."""
        heads, tokens, _ = query.shape
        places = torch.arange(tokens, device=query.device)
        back = torch.arange(self.window, device=query.device)
        rounds = []
        for number in range(_ROUNDS):
            first = self._hashes(query, number) * tokens  # the lowest code of a bucket
            codes = repeated((self._hashes(key, number) * tokens + places).sort(-1).values, heads)
            rounds.append((first, codes, torch.searchsorted(codes, first + places, right=True)))
        for queries in slices(tokens, _LEAST):
            own = places[queries].expand(heads, -1)[..., None]
            keys = [own]
            for first, codes, after in rounds:
                latest = after[:, queries, None] - 1 - back  # (heads, queries, window)
                code = codes.gather(1, latest.clamp(min=0).flatten(1)).view_as(latest)
                token = code - first[:, queries, None]
                keys.append(torch.where((latest >= 0) & (token >= 0), token, own))
            yield Piece(queries, torch.cat(keys, -1).sort(-1).values.flatten(1))

    def attend(self, piece: Piece, states: States, scale: float) -> torch.Tensor:
        """See `Pattern`."""
        query, key, value = states
        shape = (*query.shape[:2], -1, query.shape[2])
        keys = piece.keys.view(shape[:3])
        again = torch.zeros_like(keys, dtype=torch.bool)
        again[..., 1:] = keys.diff() == 0  # in both rounds, or padding
        scores = torch.einsum("hqd,hqkd->hqk", query, key.reshape(shape)) * scale
        weights = scores.masked_fill(again, -torch.inf).softmax(-1)
        return torch.einsum("hqk,hqkd->hqd", weights, value.reshape(shape))

    def _hashes(self, states: torch.Tensor, number: int) -> torch.Tensor:
        """Return the bucket of each of (heads, tokens, head_dim), int64."""
        shape = (states.shape[-1], -(-self.buckets // 2))
        projection = normal(shape, self.seed, f"{self.layer}.{number}", states.device)
        turned = states.float() @ projection
        return torch.cat([turned, -turned], -1)[..., : self.buckets].argmax(-1)


# Cached on the device: each copy to it would make the host wait.
@functools.lru_cache(maxsize=1024)
def normal(shape: tuple[int, ...], seed: int, name: str, device: torch.device) -> torch.Tensor:
    """Return normally distributed numbers in fp32."""
    return draw(shape, seed, name).to(device)


def draw(shape: tuple[int, ...], seed: int, name: str) -> torch.Tensor:
    """Return normal numbers in fp32 on the CPU, which depend only on seed and name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator)
