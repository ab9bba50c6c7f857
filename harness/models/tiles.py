"""MLPs computed over some tokens at a time (ALST's TiledMLP, arXiv 2506.13996, section 3.1).

A tile keeps its input alone and is computed again in its backward pass. The whole MLP thus needs
the memory of one tile. DeepSpeed's TiledMLP runs a backward pass of its own for each tile, after
which ZeRO has to be told that a gradient is not yet whole. Here tiles are parts of one graph:
autograd adds their gradients up before any hook of ZeRO sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from harness.models.flow import StandIn
from harness.models.keeping import keeping_none
from harness.models.pieces import decoder_layers

MLP = "mlp"
"""Name of the MLP within a decoder layer, in most families."""


def tile_mlps(model: PreTrainedModel, tiles: int) -> set[type[nn.Module]]:
    """Let the MLP of every decoder layer take its tokens in `tiles` parts, in place; returns the
    classes of these MLPs.

    Raises ValueError for a layer whose MLP is not a module of its own.
    """
    classes = set()
    for layer in decoder_layers(model)[1]:
        if isinstance(layer, StandIn):
            continue
        mlp = getattr(layer, MLP, None)
        if not isinstance(mlp, nn.Module):
            raise ValueError(f"the MLP of {type(layer).__name__} is not a module {MLP!r}")
        mlp.forward = _tiled(mlp, tiles)
        classes.add(type(mlp))
    return classes


def _tiled(mlp: nn.Module, tiles: int) -> Callable[..., torch.Tensor]:
    inner: Callable[..., torch.Tensor] = mlp.forward

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        """(micro_batch, seq_len, hidden_size) each; as one row, so that tiles are contiguous."""
        run = inner
        if mlp.training and torch.is_grad_enabled():
            run = partial(checkpoint, inner, use_reentrant=False)
        rows = [x.reshape(1, -1, x.shape[-1]).chunk(tiles, 1) for x in inputs]
        with keeping_none():
            output = torch.cat([run(*parts) for parts in zip(*rows, strict=True)], 1)
        return output.view(*inputs[0].shape[:-1], -1)

    return forward
