"""Models that compute as in training: with its attention, or with two reversible streams.

Exports contain a copy of this file and of the files it imports (models/export_code.py).
"""

from __future__ import annotations  # exports are opened by older Pythons, too

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from harness.models.efficient_attention.kinds import function_name, is_kind
from harness.models.reversible import reverse_layers


class AsTrained:
    """Mixin for a transformers class: the same weights, computed as in training.

    `config.trained_attention` holds the kind of attention, its sizes and its seed; the caller may
    choose another attn_implementation. `config.reversible`: the layers have two streams.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        chosen = config._attn_implementation
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if chosen is None and (attention := getattr(config, "trained_attention", None)):
            attend_as_trained(self, attention)
        if getattr(config, "reversible", False):
            reverse_layers(self)  # type: ignore[arg-type]


def attend_as_trained(model: Any, attention: dict[str, Any]) -> None:
    """Make a transformers model use a kind of attention, in place."""
    name = function_name(attention["kind"], attention["sizes"], attention["seed"])
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = name
    inner = model.forward  # adapters call forward without the model's hooks
    forward = functools.partial(_forward, model, inner)
    model.forward = functools.update_wrapper(forward, inner)


def _forward(model: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `inner` with the document bounds that follow from the positions.

    Raises ValueError for padding and for caches with empty slots, which these kinds of attention do
    not support.
    """
    if not is_kind(model.config._attn_implementation):  # exact attention was chosen later
        return inner(*args, **kwargs)
    given = inspect.signature(inner).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    # transformers before 5.24 calls the cache past_key_values.
    mask, cache = given.get("attention_mask"), given.get("cache", given.get("past_key_values"))
    if mask is not None and not bool(mask.all()):
        raise ValueError("this attention also reads padding: use rows of equal length")
    if getattr(cache, "is_compileable", False):
        raise ValueError("this attention also reads empty cache positions: use a dynamic cache")
    positions = given.get("position_ids")
    is_first = cache is None or not cache.get_seq_length()
    if positions is not None and is_first and "cu_seq_lens_q" not in given:
        ids = given.get("input_ids")
        rows = (given["inputs_embeds"] if ids is None else ids).shape[0]
        given["cu_seq_lens_q"] = _bounds(positions.expand(rows, -1))
    return inner(**given)


def _bounds(positions: torch.Tensor) -> torch.Tensor:
    """Return the start of each document and the end of the last, in concatenated rows."""
    follows = positions.flatten().cpu().diff() == 1
    starts = 1 + torch.nonzero(~follows)[:, 0]
    return torch.cat([starts.new_zeros(1), starts, starts.new_tensor([positions.numel()])])
