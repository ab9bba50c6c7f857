"""The attention implementations: a row for each value of model.attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Attention:
    """An implementation, by its Hugging Face name."""

    package: str | None = None
    """The package that brings it, for GPUs alone."""
    takes_bounds: bool = False
    """True if it is given the bounds of documents (models/attention.py) rather than a mask."""
    has_dropout: bool = True
    """True if it can drop attention weights."""
    is_traced: bool = False
    """True if its saved activations were compared with a trace."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of a kind that computes less than exact attention, model.attention_NAME, and their
    defaults; {} for exact attention."""
    keys: Callable[[Mapping[str, int], float], float] = lambda sizes, half: half
    """Keys that a token is computed with on average, of the sizes and half the sequence's tokens:
    products with one key and its value."""

    @property
    def is_exact(self) -> bool:
        """True if it computes the softmax over all tokens that a mask lets through."""
        return not self.sizes


def _kind(keys: Callable[[Mapping[str, int], float], float], **sizes: int) -> Attention:
    """Return a row of models/efficient_attention, which keeps queries, keys and values alone."""
    return Attention(takes_bounds=True, has_dropout=False, is_traced=True, sizes=sizes, keys=keys)


def seen_by(attention: str, sizes: Mapping[str, int]) -> Callable[[int], float]:
    """Return the tokens that MFU counts for one token of so many: all of them where attention is
    exact, whatever a mask hides (layout/shape.py), and else those that it is computed with.
    """
    row = ATTENTIONS[attention]
    return lambda seq_len: seq_len if row.is_exact else min(seq_len, row.keys(sizes, seq_len / 2))


ATTENTIONS = {
    "sdpa": Attention(is_traced=True),
    "eager": Attention(is_traced=True),
    "varlen": Attention(takes_bounds=True, has_dropout=False, is_traced=True),
    "flash_attention_2": Attention("flash_attn", takes_bounds=True),
    "flash_attention_3": Attention("flash_attn_3", takes_bounds=True),
    "longformer": _kind(
        lambda sizes, half: min(half, sizes["window"] + sizes["global"]),
        **{"window": 256, "global": 4},
    ),
    "strided": _kind(
        lambda sizes, half: min(half, sizes["window"] + half / sizes["window"]), window=128
    ),
    "linformer": _kind(
        lambda sizes, half: sizes["window"] / 2 + half * sizes["features"] / sizes["window"],
        window=256,
        features=32,
    ),
    # A product with each feature makes those of query and key, and the sums, and takes from them.
    "performer": _kind(lambda sizes, half: 2 * sizes["features"], features=256),
    "reformer": _kind(lambda sizes, half: 2 * sizes["window"] + 1, buckets=32, window=64),
}
SIZES = sorted({name for row in ATTENTIONS.values() for name in row.sizes})
"""Keys model.attention_NAME."""
