"""The part of the vocabulary whose logits the loss holds at a time."""

from __future__ import annotations

_FP32 = 4  # bytes
MOST_WHOLE_BYTES = 2**30
"""The largest fp32 logits of a rank's micro-batch that are held whole; the loss needs three times
as much in its backward pass."""
CHUNK_BYTES = 2**28
"""fp32 logits of a chunk: small beside a layer's activations of as many tokens, and products still
large enough for a GPU. A chunk's logits are computed twice, a third of the head's work more."""
_MULTIPLE = 128  # columns, as matrix products like them


def loss_chunk(wanted: int | None, vocab_size: int, tokens: int) -> int:
    """Return how many entries of a rank's vocabulary a chunk has; 0 where all are taken at once.

    `wanted`: model.loss_chunk. `tokens`: of a micro-batch on the rank.
    """
    if wanted is not None:
        return wanted
    if _FP32 * vocab_size * tokens <= MOST_WHOLE_BYTES:
        return 0
    return max(1, CHUNK_BYTES // (_FP32 * tokens * _MULTIPLE)) * _MULTIPLE
