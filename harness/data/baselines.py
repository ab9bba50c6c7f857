"""Baselines for the held-out loss: cross-entropy of a unigram and a bigram model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.data.batches import Stream
from harness.data.packing import IGNORED

# Enough for two decimals; a larger corpus is sampled in training order.
MAX_SAMPLES = 1 << 16
_SAMPLES_AT_ONCE = 256
# Weight of the unigram estimate in the bigram's, in counts (Dirichlet prior).
_PRIOR_COUNTS = 5.0


def unigram_and_bigram_nats(
    train: Stream, held_out: Stream, vocab_size: int
) -> tuple[float, float]:
    """Return the held-out cross-entropy, nats per target token, of smoothed unigram and bigram
    models of the train split.
    """
    before, target = _pairs(train)
    held_before, held_target = _pairs(held_out)
    # A .bin/.idx pair may hold ids that the model has but the tokenizer lacks.
    largest = max(int(ids.max()) for ids in (before, target, held_before, held_target))
    vocab_size = max(vocab_size, largest + 1)
    counts = np.bincount(target, minlength=vocab_size) + 1.0  # add-one: no id has probability 0
    unigram = counts[held_target] / counts.sum()
    pairs, counts_of_pairs = np.unique(before * vocab_size + target, return_counts=True)
    held_pairs = held_before * vocab_size + held_target
    at = np.minimum(np.searchsorted(pairs, held_pairs), len(pairs) - 1)
    pair_counts = np.where(pairs[at] == held_pairs, counts_of_pairs[at], 0)
    before_counts = np.bincount(before, minlength=vocab_size)[held_before]
    bigram = (pair_counts + _PRIOR_COUNTS * unigram) / (before_counts + _PRIOR_COUNTS)
    return float(-np.log(unigram).mean()), float(-np.log(bigram).mean())


def _pairs(stream: Stream) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (previous tokens, targets) of the first epoch, or of its first MAX_SAMPLES."""
    samples = min(stream.samples, MAX_SAMPLES)
    pairs = []
    for first in range(0, samples, _SAMPLES_AT_ONCE):
        batch = stream.batch(first, min(_SAMPLES_AT_ONCE, samples - first))
        learned = batch.labels != IGNORED
        pairs.append((batch.input_ids[learned].numpy(), batch.labels[learned].numpy()))
    before, target = zip(*pairs, strict=True)
    return np.concatenate(before), np.concatenate(target)
