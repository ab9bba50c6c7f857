"""Two streams in the plain loop's model: reversible layers as autograd alone computes them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from harness.models.pieces import decoder_layers

_NAMES = {
    "llama": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    "gpt2": ("ln_1", "attn", "ln_2", "mlp"),
}


def two_streams(model: PreTrainedModel) -> None:
    """Let attentions add to one stream and MLPs to another, both in fp32, in place; they travel
    between the layers side by side.
    """
    layers = decoder_layers(model)[1]
    for index, layer in enumerate(layers):
        modules = [getattr(layer, name) for name in _NAMES[model.config.model_type]]
        ends = index == 0, index == len(layers) - 1
        layer.forward = functools.partial(_forward, modules, model.dtype, *ends)


def _forward(
    modules: list[nn.Module],
    dtype: torch.dtype,
    is_first: bool,
    is_last: bool,
    hidden_states: torch.Tensor,
    *cache_and_mask: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if cache_and_mask:  # as GPT-2 gives them
        kwargs["attention_mask"] = cache_and_mask[1]
    norm_1, attention, norm_2, mlp = modules
    packed = torch.cat([hidden_states.float()] * 2, -1) if is_first else hidden_states
    first, second = packed.chunk(2, -1)
    first = first + attention(norm_1(second.to(dtype)), **kwargs)[0]
    second = second + mlp(norm_2(first.to(dtype)))
    return (0.5 * (first + second)).to(dtype) if is_last else torch.cat([first, second], -1)
