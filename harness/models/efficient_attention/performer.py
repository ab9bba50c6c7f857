"""Attention by random features of the softmax kernel."""

from __future__ import annotations  # exports are opened by older Pythons, too

import functools
from dataclasses import dataclass
from typing import Any

import torch

from harness.models.efficient_attention.patterns import documents, draw, slices

_CHUNK = 128  # tokens
_LEAST = 1e-6
"""Added to a query's features, the largest of which is 1, so that no sum vanishes."""

Past = tuple[torch.Tensor, torch.Tensor]
"""Sums over the tokens before a chunk, (key heads, features, head_dim + 1), times exp(-largest);
and the largest logarithm of a feature, (key heads,)."""


@dataclass(frozen=True)
class Performer:
    """FAVOR+ (arXiv 2009.14794, lemma 1 and section 2.3): the softmax kernel is a mean over
    positive features, with w from orthogonal blocks:

        exp(q k) = E exp(w q - |q|^2 / 2) exp(w k - |k|^2 / 2),

    so a token needs only sums over the tokens before it, here chunk by chunk. The error falls as 1
    / sqrt(features). The features depend on seed and layer, are shared by all heads, and are not
    redrawn during a run. Exponents are taken relative to the largest one up to the token, never to
    a later one.
    """

    features: int
    seed: int
    layer: int

    def directions(self, like: torch.Tensor) -> torch.Tensor:
        """Return w, (features, head_dim) fp32."""
        return _orthogonal(self.features, like.shape[-1], self.seed, str(self.layer), like.device)


class ByChunks(torch.autograd.Function):
    """Attention within concatenated documents.

    Keeps only queries, keys and values. The backward pass recomputes the sums before every chunk
    and holds those of one document.
    """

    @staticmethod
    def forward(
        context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: list[int],
        performer: Performer,
        scale: float,
    ) -> torch.Tensor:
        """(tokens, heads, head_dim) each -> (tokens, heads, head_dim); `bounds` of documents."""
        context.bounds, context.scale = bounds, scale
        context.directions = directions = performer.directions(query)
        context.save_for_backward(query, key, value)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for *states, result in documents(bounds, query, key, value, output):
            past = _nothing(states[1], directions)
            for tokens in slices(states[0].shape[1], _CHUNK):
                own, past = _step(past, directions, scale, *(s[:, tokens] for s in states))
                result[:, tokens] = own
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of queries, keys and values, in their shapes."""
        states, directions, scale = context.saved_tensors, context.directions, context.scale
        gradients = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in states]
        for q, k, v, due, *own in documents(context.bounds, *states, gradient, *gradients):
            chunks = [*slices(q.shape[1], _CHUNK)]
            pasts = [_nothing(k, directions)]
            for tokens in chunks[:-1]:
                parts = [s[:, tokens] for s in (q, k, v)]
                pasts.append(_step(pasts[-1], directions, scale, *parts)[1])
            due_past = torch.zeros_like(pasts[0][0])
            for tokens, (sums, largest) in zip(reversed(chunks), reversed(pasts), strict=True):
                parts = [s[:, tokens].detach().requires_grad_() for s in (q, k, v)]
                sums.requires_grad_()
                with torch.enable_grad():
                    output, (after, _) = _step((sums, largest), directions, scale, *parts)
                *computed, due_past = torch.autograd.grad(
                    (output, after), (*parts, sums), (due[:, tokens], due_past)
                )
                for whole, part in zip(own, computed, strict=True):
                    whole[:, tokens] = part
        return *gradients, None, None, None


def _step(
    past: Past,
    directions: torch.Tensor,
    scale: float,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, Past]:
    """Return a chunk's output, (heads, tokens, head_dim), and the past of the next chunk."""
    sums, before = past
    heads, tokens, width = query.shape
    q, k = (_logarithms(states, directions, scale) for states in (query, key))
    q = (q - q.detach().amax(-1, keepdim=True)).exp() + _LEAST  # a factor per query cancels
    q = q.reshape(len(key), -1, *q.shape[1:])  # (key heads, heads of each, tokens, features)
    own = k.detach().amax(-1)  # (key heads, tokens)
    k = (k - own[..., None]).exp()
    largest = torch.maximum(own.cummax(-1).values, before[:, None])
    v = torch.cat([value.float(), value.new_ones(*value.shape[:2], 1).float()], -1)
    # (key heads, query, key): no key exceeds the largest up to the query.
    ratio = own[:, None, :] - largest[:, :, None]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    ratio = ratio.masked_fill(later, -torch.inf).exp()
    output = (q @ k.mT[:, None] * ratio[:, None]) @ v[:, None]
    output = output + (q @ sums[:, None]) * (before[:, None] - largest).exp()[:, None, :, None]
    last = largest[:, -1]
    k = k * (own - last[:, None]).exp()[..., None]
    after = sums * (before - last).exp()[:, None, None] + k.mT @ v
    output = (output[..., :width] / output[..., width:]).reshape(heads, tokens, width)
    return output.to(query.dtype), (after, last)


def _logarithms(states: torch.Tensor, directions: torch.Tensor, scale: float) -> torch.Tensor:
    """Return w x - |x|^2 / 2 for (heads, tokens, head_dim), as (heads, tokens, features)."""
    x = states.float() * scale**0.5
    logarithms: torch.Tensor = x @ directions.T - x.square().sum(-1, keepdim=True) / 2
    return logarithms


def _nothing(key: torch.Tensor, directions: torch.Tensor) -> Past:
    shape = (len(key), len(directions), key.shape[-1] + 1)
    sums = torch.zeros(shape, device=key.device)
    return sums, torch.full((len(key),), -torch.inf, device=key.device)


# Cached on the device: each copy to it would make the host wait.
@functools.lru_cache(maxsize=1024)
def _orthogonal(rows: int, width: int, seed: int, name: str, device: torch.device) -> torch.Tensor:
    """Return (rows, width) fp32: orthogonal in blocks of `width` rows, each row with the length of
    a normal vector (arXiv 2009.14794, section 2.4).
    """
    blocks = -(-rows // width)
    drawn = draw((2, blocks, width, width), seed, name)
    turned, triangle = torch.linalg.qr(drawn[0].double())
    turned = turned * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # otherwise not uniform
    long: torch.Tensor = turned.mT.float() * drawn[1].norm(dim=-1, keepdim=True)
    return long.flatten(0, 1)[:rows].to(device)
