"""Reversible decoder layers: the backward pass computes a layer's input from its output.

Two streams replace one (RevNet, arXiv 1707.04585; Reformer, arXiv 2001.04451, section 3):

    y1 = x1 + attention(norm(x2))    and back    x2 = y2 - mlp(norm(y1))
    y2 = x2 + mlp(norm(y1))                      x1 = y1 - attention(norm(x2))

Both start as the embedding. Whatever follows the layers reads their mean, which equals the
embedding if the layers add nothing. Only the last two streams are kept. They are in fp32 regardless
of the model's precision: a sum rounded to bf16 is not invertible.

Each half of a layer is checkpointed by torch without a nested backward pass, so that ZeRO's hooks
see every gradient once. The input of a recomputed half is not kept; it is the stream that the next
half has just restored.
"""

from __future__ import annotations  # exports are opened by older Pythons, too

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from harness.models.units import decoder_layers

_ATTENTION = (
    ("input_layernorm", "ln_1"),
    ("self_attn", "attention", "attn"),
    ("resid_attn_dropout", "post_attention_dropout"),
)
_MLP = (("post_attention_layernorm", "ln_2"), ("mlp",), ("resid_mlp_dropout", "post_mlp_dropout"))
"""Module names, in different families, of a layer's two halves: a norm, its reader, and the dropout
of the output, if any."""


def reverse_layers(model: PreTrainedModel) -> None:
    """Give the decoder layers two streams that the backward pass restores, in place.

    Raises ValueError for a layer that lacks the modules of a half.
    """
    layers = decoder_layers(model)[1]
    running: list[Streams] = []  # of the current forward pass
    for index, layer in enumerate(layers):
        halves = halves_of(layer)
        ends = index == 0, index == len(layers) - 1
        layer.forward = functools.partial(_forward, layer, layer.forward, halves, running, *ends)


@dataclass(frozen=True)
class Half:
    """The attention or MLP of a layer, which reads one stream and adds to the other."""

    norm: nn.Module
    reader: nn.Module
    dropout: nn.Module | None

    def __call__(self, stream: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """(micro_batch, seq_len, hidden_size) in the model's precision -> the same."""
        added = self.reader(self.norm(stream), **arguments)
        added = added[0] if isinstance(added, tuple) else added
        return added if self.dropout is None else self.dropout(added)  # type: ignore[no-any-return]


def halves_of(layer: nn.Module) -> tuple[Half, Half]:
    """Return a layer's attention and MLP. Raises ValueError if it has no modules of these names."""
    halves = []
    for names in (_ATTENTION, _MLP):
        norm, reader, dropout = (
            next((getattr(layer, name) for name in each if hasattr(layer, name)), None)
            for each in names
        )
        if norm is None or reader is None:
            raise ValueError(
                f"{type(layer).__name__} is not attention and an MLP, each after a norm"
            )
        halves.append(Half(norm, reader, dropout))
    return halves[0], halves[1]


def arguments_of(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a layer's forward pass, by name."""
    arguments = inspect.signature(forward).bind(*args, **kwargs).arguments
    others = arguments.pop("kwargs", {})
    return {**arguments, **others}


Add = Callable[[torch.Tensor], torch.Tensor]


class Streams:
    """The two streams of a forward pass, (micro_batch, seq_len, hidden_size) fp32 each."""

    def __init__(self, embedding: torch.Tensor) -> None:
        self._dtype = embedding.dtype
        self.other = self.last = embedding.float()
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None
        """Both streams without a graph, once the forward pass has ended: their values after the
        half of a layer that the backward pass reaches next."""

    def add(self, half: Add, reversible: bool) -> None:
        """Add to one stream what half a layer computes from the other, and swap them."""
        if reversible:
            run = functools.partial(self._run, half, self.last.requires_grad)
            on_device = self.last.new_empty(0)  # restores its generator
            added = checkpoint(run, on_device, use_reentrant=False)
        else:
            added = half(self.last.to(self._dtype))
        self.other, self.last = self.last, self.other + added

    def _run(self, half: Add, needs_gradient: bool, on_device: torch.Tensor) -> torch.Tensor:
        if self.kept is None:  # the first time
            added = half(self.last.to(self._dtype))
        else:
            read, written = self.kept
            leaf = read.detach().requires_grad_(needs_gradient)
            added = half(leaf.to(self._dtype))
            self.kept = written - added.detach(), read
        begun: torch.Tensor = _Again.apply(added, on_device)  # type: ignore[no-untyped-call]
        return begun

    def joined(self) -> torch.Tensor:
        """Return the mean of both streams after the last layer, in the model's precision."""
        self.kept = self.other.detach(), self.last.detach()
        mean = ((self.other + self.last) / 2).to(self._dtype)
        del self.other, self.last  # autograd needs neither
        return mean


class _Again(torch.autograd.Function):
    """Starts the backward pass of half a layer by reading a saved tensor, which triggers the
    recomputation.

    Otherwise its last module would trigger it after ZeRO 3 has gathered that module's weights, and
    the recomputation would release them.
    """

    @staticmethod
    def forward(ctx: Any, added: torch.Tensor, any_tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(any_tensor)
        return added.view_as(added)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _ = ctx.saved_tensors
        return gradient, None


def _forward(
    layer: nn.Module,
    inner: Callable[..., Any],
    halves: tuple[Half, Half],
    running: list[Streams],
    is_first: bool,
    is_last: bool,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """A layer's forward pass in place of `inner`. The first layer receives the embedding, the
    others a stream.
    """
    arguments = arguments_of(inner, *args, **kwargs)
    hidden: torch.Tensor = arguments.pop("hidden_states")
    if is_first:
        running[:] = [Streams(hidden)]
    streams = running[0]
    if not is_first:
        streams.last = hidden  # after ZeRO's hooks on the previous layer
    attention, mlp = halves
    for half in (functools.partial(attention, **arguments), mlp):
        streams.add(half, layer.training and torch.is_grad_enabled())
    return running.pop().joined() if is_last else streams.last
