"""Attention restricted to keys with the same hash."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from harness.models.efficient_attention.draws import normal
from harness.models.efficient_attention.pieces import Piece, States, repeated

_ROUNDS = 2
_QUERIES = 64


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
        for start in range(0, tokens, _QUERIES):
            queries = slice(start, min(start + _QUERIES, tokens))
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
