"""Stochastic depth: in training, layers are left out at random (arXiv 1603.09382)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from harness.models.flow import StandIn
from harness.models.pieces import decoder_layers


def drop_layers(model: PreTrainedModel, rate: float) -> None:
    """Let layer l of L be left out with probability `rate` * l / L, of each sample by itself; in
    place. Its output is divided by the probability that it is there, so that evaluation needs no
    other scale. Layers of other pipeline stages are left as they are.
    """
    _, layers = decoder_layers(model)
    for number, layer in enumerate(layers, 1):
        if not isinstance(layer, StandIn):
            vars(layer)["depth_dropout"] = (
                rate * number / len(layers)
            )  # by which a model is known as random
            layer.register_forward_hook(_leave_out, with_kwargs=True)


def _leave_out(
    layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> Any:
    """Keep what the layer was given, (micro_batch, seq_len, hidden_size), of some samples.

    Raises ValueError for a layer whose output is of another shape than its input.
    """
    if not layer.training:
        return None
    before = args[0] if args else kwargs["hidden_states"]
    after = output[0] if isinstance(output, tuple) else output
    if after.shape != before.shape:
        raise ValueError(
            f"model.stochastic_depth: {type(layer).__name__} turns {tuple(before.shape)} into "
            f"{tuple(after.shape)}, and cannot be left out: set it to 0"
        )
    keep = 1.0 - float(vars(layer)["depth_dropout"])
    kept = torch.rand(len(before), 1, 1, device=before.device) < keep
    mixed = before + (after - before) * (kept / keep).to(after.dtype)
    return (mixed, *output[1:]) if isinstance(output, tuple) else mixed
