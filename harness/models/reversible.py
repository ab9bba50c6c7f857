"""Reversible decoder layers: the backward pass computes a layer's input from its output.

Two streams take the place of one (RevNet, arXiv 1707.04585; Reformer, arXiv 2001.04451, section 3):

    y1 = x1 + attention(norm(x2))    and back    x2 = y2 - mlp(norm(y1))
    y2 = x2 + mlp(norm(y1))                      x1 = y1 - attention(norm(x2))

Both begin as the embedding, and what follows the layers reads their mean, which is as large as the
embedding where the layers add nothing. Only the last two streams are kept. They are in fp32
whatever the model computes in: a sum that is rounded to bf16 is no longer invertible.

Each half of a layer is checkpointed by torch without a backward pass within the backward pass, so
that ZeRO's hooks see every gradient once; but the input of a half that is computed again is not
kept, it is the stream that the half after it has just restored.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from harness.models.pieces import decoder_layers

_ATTENTION = (
    ("input_layernorm", "ln_1"),
    ("self_attn", "attention", "attn"),
    ("resid_attn_dropout", "post_attention_dropout"),
)
_MLP = (
    ("post_attention_layernorm", "ln_2"),
    ("mlp",),
    ("resid_mlp_dropout", "post_mlp_dropout"),
)
"""Modules of a layer's halves by the names that families give them: a norm, what reads it, and the
dropout of what that gives, if any."""


def reverse_layers(model: PreTrainedModel) -> None:
    """Give the decoder layers two streams that the backward pass restores, in place.

    Raises ValueError for a layer without the modules of both halves.
    """
    layers = decoder_layers(model)[1]
    running: list[Streams] = []  # of the forward pass that is going on
    for index, layer in enumerate(layers):
        halves = halves_of(layer)
        ends = index == 0, index == len(layers) - 1
        layer.forward = functools.partial(_forward, layer, layer.forward, halves, running, *ends)


@dataclass(frozen=True)
class Half:
    """Attention or MLP of a layer: it adds to one stream what it makes of the other."""

    norm: nn.Module
    reader: nn.Module
    dropout: nn.Module | None

    def __call__(self, stream: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """(micro_batch, seq_len, hidden_size) in the model's precision -> the same."""
        added = self.reader(self.norm(stream), **arguments)
        added = added[0] if isinstance(added, tuple) else added
        return added if self.dropout is None else self.dropout(added)  # type: ignore[no-any-return]


def halves_of(layer: nn.Module) -> tuple[Half, Half]:
    """Return a layer's attention and its MLP. Raises ValueError if it has none by these names."""
    halves = []
    for names in (_ATTENTION, _MLP):
        norm, reader, dropout = (
            next((getattr(layer, name) for name in each if hasattr(layer, name)), None)
            for each in names
        )
        if norm is None or reader is None:
            raise ValueError(f"{type(layer).__name__} is not attention and MLP behind a norm each")
        halves.append(Half(norm, reader, dropout))
    return halves[0], halves[1]


def arguments_of(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what a layer's forward pass is given, by name."""
    arguments = inspect.signature(forward).bind(*args, **kwargs).arguments
    others = arguments.pop("kwargs", {})
    return {**arguments, **others}


Add = Callable[[torch.Tensor], torch.Tensor]


class Streams:
    """The two streams of one forward pass, (micro_batch, seq_len, hidden_size) fp32 each."""

    def __init__(self, embedding: torch.Tensor) -> None:
        self._dtype = embedding.dtype
        self.other = self.last = embedding.float()
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None
        """Both streams without a graph, from the end of the forward pass on: as they were behind
        the half of a layer that the backward pass comes to next."""

    def add(self, half: Add, reversible: bool) -> None:
        """Add to one stream what half a layer makes of the other; they change places."""
        if reversible:
            run = functools.partial(self._run, half, self.last.requires_grad)
            on_device = self.last.new_empty(0)  # whose generator is put back for the second time
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
        """Return the mean of both behind the last layer, in the model's precision."""
        self.kept = self.other.detach(), self.last.detach()
        mean = ((self.other + self.last) / 2).to(self._dtype)
        del self.other, self.last  # autograd holds what it needs of them: nothing
        return mean


class _Again(torch.autograd.Function):
    """Begins the backward pass of half a layer, which asks here for a tensor that was kept, and so
    has all of it computed again.

    Otherwise its last module would ask, for which ZeRO 3 has then gathered weights: computing it
    again would release them.
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
    """A layer's forward pass in place of `inner`. The first one is given the embedding, others a
    stream.
    """
    arguments = arguments_of(inner, *args, **kwargs)
    hidden: torch.Tensor = arguments.pop("hidden_states")
    if is_first:
        running[:] = [Streams(hidden)]
    streams = running[0]
    if not is_first:
        streams.last = hidden  # behind the hooks of ZeRO on the layer before
    attention, mlp = halves
    for half in (functools.partial(attention, **arguments), mlp):
        streams.add(half, layer.training and torch.is_grad_enabled())
    return running.pop().joined() if is_last else streams.last
