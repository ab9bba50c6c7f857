"""Attention over whole rows whose tokens are sharded across ranks (Ulysses, arXiv:2309.14509).

Before attention an all-to-all gives each rank whole rows of some heads; after it, its own tokens of
all heads. Everything else in a decoder is computed per token. The masks are transformers' own, for
whole rows. They reach attention as a keyword of the model, which gradient checkpointing passes on.
"""

import contextlib
import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.models.attention import attend_with, attention_function
from harness.models.exchange import Group, exchanged, joined, own_slice
from harness.models.stage import balancing_of

_NAME = "divided_rows"
_KEYWORD = "whole_rows"


@dataclass(frozen=True)
class Rows:
    """The rows of one micro-batch as attention sees them, on a rank that has part of each.

    `masks`: a single one for all layers, or one per layer type; None for plain causal order.
    `positions` (micro_batch, seq_len) or None.
    """

    group: Group
    config: Any  # with the attention for whole rows
    masks: torch.Tensor | dict[str, torch.Tensor | None] | None
    positions: torch.Tensor | None


class DividedRows:
    """The rows of a model's batches, sharded across the ranks of a group."""

    def __init__(self, model: PreTrainedModel, group: Group) -> None:
        """Replace the model's attention function."""
        self._model, self.group = model, group
        self._config = copy.deepcopy(model.config)  # with the attention for whole rows
        self._attention: str = model.config._attn_implementation
        attend_with(_NAME, model)

    @contextlib.contextmanager
    def undivided(self) -> Iterator[None]:
        """Within this context, every rank computes whole rows, of any length."""
        attend_with(self._attention, self._model)
        try:
            yield
        finally:
            attend_with(_NAME, self._model)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of (micro_batch, seq_len)."""
        return own_slice(tensor, 1, self.group)

    def keywords(self, input_ids: torch.Tensor, positions: torch.Tensor | None) -> dict[str, Any]:
        """Return the model's other arguments for this rank's tokens: their positions, and the Rows.

        Both parameters are whole rows, (micro_batch, seq_len).
        """
        like = torch.empty(*input_ids.shape, 1, dtype=self._model.dtype, device=input_ids.device)
        masks = create_masks_for_generate(self._config, like, None, None, position_ids=positions)
        places = positions
        if places is None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        rows = Rows(self.group, self._config, masks, positions)
        return {"position_ids": self.own(places), _KEYWORD: rows}

    def balancing(self, counted: torch.Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which a mixture balances its experts over whole rows: every rank
        computes the same loss, but only the gradient of its own tokens' routers.

        counted (micro_batch, seq_len), whole rows: False for padding. None: all tokens count.
        """
        if counted is not None:  # ordered by rank, as in `joined`
            parts = counted.view(len(counted), self.group.size(), -1)
            counted = parts.transpose(0, 1)

        def over_all_tokens(routers: Any) -> Any:
            return tuple(joined(own, 0, self.group) for own in routers or ())

        return balancing_of(self._model, counted, over_all_tokens)


class _SomeHeads:
    """An attention module with the heads of one rank, as the function for whole rows expects it."""

    def __init__(self, module: nn.Module, config: Any, num_key_value_groups: int) -> None:
        self.__dict__.update(
            module=module, config=config, num_key_value_groups=num_key_value_groups
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' signature: (batch, heads, own tokens, head_dim) each -> (batch,
    own tokens, heads, head_dim).
    """
    rows: Rows = keywords.pop(_KEYWORD)
    places = rows.group.size()
    if key.shape[1] % places:  # fewer key heads than ranks: each is copied to several
        copies = places // key.shape[1]
        key, value = (heads.repeat_interleave(copies, 1) for heads in (key, value))
    query, key, value = (exchanged(x, 1, 2, rows.group) for x in (query, key, value))
    function = attention_function(rows.config._attn_implementation, module)
    masks = rows.masks
    if isinstance(masks, dict):
        masks = masks[module.config.layer_types[module.layer_idx]]
    keywords["position_ids"] = rows.positions
    heads = _SomeHeads(module, rows.config, query.shape[1] // key.shape[1])
    output, _ = function(heads, query, key, value, masks, **keywords)
    return exchanged(output, 1, 2, rows.group), None


# Without a mask function of the same name, models create no mask.
ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
