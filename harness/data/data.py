"""Tokens ready to train on, and their summary for users."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from harness.data.batches import Stream
from harness.data.mixture import Mixture
from harness.data.packing import IGNORED
from harness.data.padded import Padded
from harness.data.source import Source
from harness.data.tokenizer import vocab_size

# Enough for two decimals; larger corpora are sampled in training order.
MAX_SAMPLES = 1 << 16
_SAMPLES_AT_ONCE = 256
# Weight of the unigram estimate in the bigram estimate, in counts (Dirichlet prior).
_PRIOR_COUNTS = 5.0


def unigram_and_bigram_nats(
    train: Stream, held_out: Stream, vocab_size: int
) -> tuple[float, float]:
    """Return the held-out cross-entropy of smoothed unigram and bigram models of the train split,
    in nats per target token.
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
    """Return (previous tokens, targets) of the first epoch, at most MAX_SAMPLES samples of it."""
    samples = min(stream.samples, MAX_SAMPLES)
    pairs = []
    for first in range(0, samples, _SAMPLES_AT_ONCE):
        batch = stream.batch(first, min(_SAMPLES_AT_ONCE, samples - first))
        learned = batch.labels != IGNORED
        pairs.append((batch.input_ids[learned].numpy(), batch.labels[learned].numpy()))
    before, target = zip(*pairs, strict=True)
    return np.concatenate(before), np.concatenate(target)


@dataclass(frozen=True)
class Data:
    """Tokens ready to train on."""

    train: Stream
    held_out: Stream
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    """Hash of the token ids, the document boundaries and the tokenizer."""
    sources: tuple[Source, ...]
    eval_sets: Mapping[str, Stream] = field(default_factory=dict)
    """Named sets of data.eval_path; `held_out` is the first of them."""
    set_sources: tuple[Source, ...] = ()
    """Sources of the held-out sets."""
    long_held_out: Stream | None = None
    """The text of `held_out` as samples of eval.seq_len tokens."""
    old: Stream | None = None
    """Held-out samples of the data.rehearse corpus."""
    old_source: Source | None = None
    """The source of `old`."""

    @property
    def documents(self) -> int:
        """Number of documents in all sources."""
        return sum(source.facts.documents for source in self.sources)

    @property
    def tokens(self) -> int:
        """Number of tokens in all sources, with separators."""
        return sum(source.tokens for source in self.sources)

    @property
    def document_mask(self) -> bool:
        """True if samples of the train split or of a held-out set have document boundaries."""
        streams = (self.train, self.held_out, *self.eval_sets.values(), self.old)
        return any(stream is not None and stream.document_mask for stream in streams)

    @property
    def names(self) -> list[str]:
        """Names of a mixture's sources; empty without a mixture."""
        return [source.name for source in self.sources if source.name]

    def summary(self) -> list[str]:
        """Return one line per source and held-out set, for users to check."""
        sets = [f"held-out set {source.summary()}" for source in self.set_sources]
        return [*(source.summary() for source in self.sources), *sets]

    def warnings(self) -> list[str]:
        """Return warnings about the data, one sentence per line."""
        sources = (*self.sources, *self.set_sources)
        return [f"{s.corpus.path}: {text}" for s in sources for text in s.warnings().values()]

    def mixture(self) -> list[Any] | None:
        """Return [first sample, samples per source in a period] of each part, or None."""
        if not isinstance(self._ordered, Mixture):
            return None
        return [[part.first, list(part.weights)] for part in self._ordered.order.parts]

    def shares(self, samples: int) -> list[str]:
        """Return each source's share and epochs in a run of `samples` samples, one per line."""
        mixed = self._ordered
        if not isinstance(mixed, Mixture) or not samples:
            return []
        drawn = mixed.order.drawn_before(samples)
        return [
            f"{name}: {count / samples:.2%} of the windows, {count / stream.samples:.2f} epochs"
            for name, count, stream in zip(self.names, drawn, mixed.streams, strict=True)
        ]

    @property
    def _ordered(self) -> Stream:
        """The train split before its samples are grouped by length."""
        return self.train.base if isinstance(self.train, Padded) else self.train

    def events(self) -> list[dict[str, Any]]:
        """Return the events about the data, for events.jsonl."""
        return [event for source in (*self.sources, *self.set_sources) for event in source.events()]

    @property
    def begin(self) -> list[int]:
        """Ids that are prepended to each text document; [] if none are."""
        return next(([*source.begin] for source in self.sources if source.begin), [])

    @property
    def vocab_size(self) -> int:
        """The tokenizer's largest id plus one."""
        return vocab_size(self.tokenizer)

    @property
    def eos_id(self) -> int:
        """Id of the separator, which ends every document and is a target."""
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def _baselines(self) -> tuple[float, float]:
        return unigram_and_bigram_nats(self.train, self.held_out, self.vocab_size)

    @property
    def unigram_nats(self) -> float:
        """Held-out cross-entropy of a unigram model of the train split, in nats per token."""
        return self._baselines[0]

    @property
    def bigram_nats(self) -> float:
        """The same for a bigram model interpolated with the unigram model."""
        return self._baselines[1]
