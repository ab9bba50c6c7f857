"""Models that compute as the run did that trained them: with its attention, with two streams.

Exports bring a copy of this file and of those that it imports (models/export_code.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from harness.models.efficient_attention.kinds import function_name, is_kind
from harness.models.reversible import reverse_layers


class AsTrained:
    """Put before a class of transformers: the same weights, computed as they were trained.

    `config.trained_attention` holds the kind of attention, its sizes and its seed; another
    attn_implementation is the caller's choice. `config.reversible`: the layers have two streams.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        chosen = config._attn_implementation
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if chosen is None and (attention := getattr(config, "trained_attention", None)):
            attend_as_trained(self, attention)
        if getattr(config, "reversible", False):
            reverse_layers(self)  # type: ignore[arg-type]


def attend_as_trained(model: Any, attention: dict[str, Any]) -> None:
    """Let a model of transformers attend with a kind of attention, in place."""
    name = function_name(attention["kind"], attention["sizes"], attention["seed"])
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = name
    inner = model.forward  # adapters call it without the model's hooks
    forward = functools.partial(_forward, model, inner)
    model.forward = functools.update_wrapper(forward, inner)


def _forward(model: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A forward pass in place of `inner`, with the bounds of the documents that positions number.

    Raises ValueError for what a kind of attention does not know: padding, and places of a cache
    that hold no token yet.
    """
    if not is_kind(model.config._attn_implementation):  # exact attention was chosen since
        return inner(*args, **kwargs)
    given = inspect.signature(inner).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    # transformers before 5.24 says past_key_values.
    mask, cache = given.get("attention_mask"), given.get("cache", given.get("past_key_values"))
    if mask is not None and not bool(mask.all()):
        raise ValueError("this attention reads padding, too: take rows of one length")
    if getattr(cache, "is_compileable", False):
        raise ValueError("this attention reads empty places, too: take a dynamic cache")
    positions = given.get("position_ids")
    is_first = cache is None or not cache.get_seq_length()
    if positions is not None and is_first and "cu_seq_lens_q" not in given:
        ids = given.get("input_ids")
        rows = (given["inputs_embeds"] if ids is None else ids).shape[0]
        given["cu_seq_lens_q"] = _bounds(positions.expand(rows, -1))
    return inner(**given)


def _bounds(positions: torch.Tensor) -> torch.Tensor:
    """Return where the documents begin and the last one ends, of rows that are laid end to end."""
    follows = positions.flatten().cpu().diff() == 1
    starts = 1 + torch.nonzero(~follows)[:, 0]
    return torch.cat([starts.new_zeros(1), starts, starts.new_tensor([positions.numel()])])
