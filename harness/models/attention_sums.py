"""Entropy and coverage of attention per layer, measured without changing the forward pass.

The run's own attention function computes the output. The weights of some queries are computed a
second time here, from the same queries and keys.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.layout.attention_table import ATTENTIONS
from harness.models.efficient_attention.kinds import is_kind

QUERIES = 64
"""Number of queries to probe per sample, evenly distributed; all of them in a shorter sample."""
COVERED = 0.9
"""Share of a query's attention that the covered tokens receive together."""
_AT_ONCE = 2**22  # weights in fp32
_UNKNOWN = ("s_aux", "position_bias", "relative_position_bias")  # inputs besides queries and keys


class AttentionSums:
    """Sums over samples, heads and queries of attention statistics.

    Entropy: of a query's weights, in nats (arXiv 2303.06296). Coverage: the fraction of the visible
    tokens that, most attended first, receive COVERED of the query's attention.
    """

    def __init__(self, layers: int, counted: torch.Tensor) -> None:
        """`counted` (micro_batch,) bool on the device: the samples to include."""
        self._counted = counted
        self.sums = torch.zeros(layers, 3, dtype=torch.float64, device=counted.device)
        """(layers, 3): entropy, coverage, and the number of terms in each sum. NaN if attention
        uses more than queries and keys."""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Within this context, the model's attention adds to the sums."""
        asked: Any = ALL_ATTENTION_FUNCTIONS
        functions = asked.get_interface

        def get_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            row = ATTENTIONS.get(name)
            function: Callable[..., Any] = functions(name, default)
            if is_kind(name) or (row and not row.is_exact):  # other weights than `_add` computes
                self.sums.fill_(torch.nan)
                return function
            return partial(self._attend, function)

        asked.get_interface = get_interface
        try:
            yield
        finally:
            del asked.get_interface

    def _attend(
        self,
        function: Callable[..., Any],
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **keywords: Any,
    ) -> Any:
        """Attention in transformers' signature, (micro_batch, heads, seq_len, head_dim) each."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or any(keywords.get(name) is not None for name in _UNKNOWN):
            self.sums.fill_(torch.nan)
        else:
            self._add(layer, query, key, mask, keywords)
        return function(module, query, key, value, mask, **keywords)

    def _add(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        keywords: dict[str, Any],
    ) -> None:
        rows, heads, length, width = query.shape
        scale = keywords.get("scaling") or width**-0.5
        softcap = keywords.get("softcap")
        places = probed_queries(length, query.device)
        step = max(1, _AT_ONCE // (heads * length))
        for row in range(rows):
            keys = key[row].repeat_interleave(heads // key.shape[1], 0).float()
            for some in places.split(step):
                scores = query[row][:, some].float() @ keys.mT * scale  # (heads, queries, seq_len)
                if softcap:
                    scores = torch.tanh(scores / softcap) * softcap
                seen, added = _visible(mask, row, some, length, keywords)
                if added is not None:
                    scores = scores + added
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).double()
                entropy = torch.special.entr(weights).sum()
                visible = seen.sum(-1).expand(weights.shape[:-1])
                most = weights.sort(-1, descending=True).values.cumsum(-1)
                needed = (most < COVERED).sum(-1) + 1
                coverage = (needed / visible.clamp(min=1)).clamp(max=1).sum()
                own = torch.stack([entropy, coverage, torch.ones_like(entropy) * visible.numel()])
                self.sums[layer] += torch.where(self._counted[row], own, 0)


def probed_queries(length: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the positions of the queries to probe."""
    count = min(length, QUERIES)
    return torch.arange(1, count + 1, device=device) * length // count - 1


def _visible(
    mask: torch.Tensor | None, row: int, queries: torch.Tensor, length: int, keywords: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tokens that these queries of a row see, (heads or 1, queries, seq_len) bool, and
    the bias added to their scores.

    Follows the attention functions: a mask, boolean or additive; document bounds; or plain causal
    order.
    """
    if mask is not None:
        own = mask[min(row, len(mask) - 1)][:, queries, :length]
        if own.dtype == torch.bool:
            return own, None
        return own > torch.finfo(own.dtype).min / 2, own.float()
    places = torch.arange(length, device=queries.device)
    seen = places <= queries[:, None]
    if (bounds := keywords.get("cu_seq_lens_q")) is not None:
        document = torch.searchsorted(bounds, row * length + places, right=True)
        seen &= document == document[queries][:, None]
    if window := keywords.get("sliding_window"):
        seen &= places > queries[:, None] - window
    return seen[None], None
