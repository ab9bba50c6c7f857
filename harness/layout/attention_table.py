"""The attention implementations, one row for each value of model.attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Attention:
    """An attention implementation, by its Hugging Face name."""

    package: str | None = None
    """The package that provides it, on GPUs only."""
    takes_bounds: bool = False
    """True if it takes document boundaries (models/attention.py) instead of a mask."""
    is_traced: bool = False
    """True if its saved activations were compared with a trace."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of an approximate attention (model.attention_NAME) with their defaults; {} if exact."""
    keys: Callable[[Mapping[str, int], float], float] = lambda sizes, half: half
    """Average number of keys per query, from the sizes and half the sequence length; each key
    stands for its products with the query and the value.
    """

    keeps_scores: bool = False
    """True if all scores are saved for the backward pass."""
    is_own: bool = False
    """True if it comes from run.code; it always gets a mask, of booleans."""
    approximates: bool = False
    """True if it is not exact although it has no sizes."""

    @property
    def is_exact(self) -> bool:
        """True if it computes the softmax over all tokens that the mask admits."""
        return not (self.sizes or self.approximates)


def _kind(keys: Callable[[Mapping[str, int], float], float], **sizes: int) -> Attention:
    """Return a row for models/efficient_attention, which saves only queries, keys and values."""
    return Attention(takes_bounds=True, is_traced=True, sizes=sizes, keys=keys)


def seen_by(attention: str, sizes: Mapping[str, int]) -> Callable[[int], float]:
    """Return a function from sequence length to the tokens that MFU counts per token: all of them
    for exact attention, regardless of the mask (layout/shape.py), otherwise the keys per query.
    """
    row = ATTENTIONS[attention]
    return lambda seq_len: seq_len if row.is_exact else min(seq_len, row.keys(sizes, seq_len / 2))


ATTENTIONS = {
    "sdpa": Attention(is_traced=True),
    "eager": Attention(is_traced=True, keeps_scores=True),
    "varlen": Attention(takes_bounds=True, is_traced=True),
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
    # Per feature, a product each for the query, for the key, for adding to the sums and for reading
    # them: those of two keys.
    "performer": _kind(lambda sizes, half: 2 * sizes["features"], features=256),
    "reformer": _kind(lambda sizes, half: 2 * sizes["window"] + 1, buckets=32, window=64),
}
SIZES = sorted({name for row in ATTENTIONS.values() for name in row.sizes})
"""Names of all sizes, as in model.attention_NAME."""

WITHOUT_ATTENTION = {"recurrent", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}
_UNMASKED = {"biogpt", "bloom", "gpt_oss", "mpt", "openai-gpt", "opt", "xglm"}
IGNORING_DOCUMENTS = WITHOUT_ATTENTION | _UNMASKED
"""Models that read no document boundaries; others may be found when they are built."""
"""Values of model_type whose layers have no attention."""
