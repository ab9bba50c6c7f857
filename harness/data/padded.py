"""Samples of one document each, padded to the longest in their micro-batch.

Their order is a pure function of the samples' own order and lengths; it depends neither on the
ranks nor on the size of a step. Successive groups of a pool are a golden-ratio fraction of the pool
apart (a Kronecker sequence), so any few consecutive groups cover its range of lengths evenly, and
each step mixes short and long documents as evenly as its few groups allow.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from harness.config.batch import Curriculum, Slice
from harness.data.batch import Batch
from harness.data.batches import Sample, StepData, Stream, share_of_rank
from harness.data.order import round_keys
from harness.data.packing import Document, Packed

_GOLDEN = (math.sqrt(5) - 1) / 2
_KEPT_POOLS = 8
"""Number of pools to cache; a step may need several."""


class Pools:
    """Length-sorted pools of a stream's samples, computed on demand.

    No pool crosses the end of an epoch, so that an epoch has every sample once; nor does it cross a
    sample at which a mixture changes its shares.
    """

    def __init__(
        self,
        lengths: Callable[[NDArray[np.int64]], NDArray[np.int64]],
        pool: int,
        group: int,
        epoch: int,
        end: int | None,
        key: str,
        changes: Sequence[int] = (),
    ) -> None:
        """`lengths` returns lengths in tokens; `epoch`: samples per epoch; `end`: samples in the
        stream, None if endless; `changes`: samples at which a new pool must start, ascending.
        """
        assert pool % group == 0, "a pool has whole groups"
        self._lengths, self._pool, self._group = lengths, pool, group
        self._epoch, self._end, self._key = epoch, end, key
        self._changes = np.array([0, *changes, np.iinfo(np.int64).max])
        self._sorted = lru_cache(_KEPT_POOLS)(self._sort)

    def places(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the stream's sample at each index of this order."""
        change = self._changes[np.searchsorted(self._changes, samples, side="right") - 1]
        within = np.minimum(samples % self._epoch % self._pool, samples - change)
        firsts = samples - within
        chosen = np.empty_like(samples)
        for first in sorted(set(firsts.tolist())):
            here = firsts == first
            chosen[here] = self._sorted(first)[within[here]]
        return chosen

    def _sort(self, first: int) -> NDArray[np.int64]:
        """Return the samples of the pool from `first` on, in order, an incomplete group last."""
        of_epoch = first % self._epoch
        change = int(self._changes[np.searchsorted(self._changes, first, side="right")])
        size = min(self._pool - of_epoch % self._pool, self._epoch - of_epoch, change - first)
        if self._end is not None:
            size = min(size, self._end - first)
        own = first + np.arange(size)
        own = own[np.argsort(-self._lengths(own), kind="stable")]
        groups = size // self._group
        stride = next(n for n in _near(round(groups * _GOLDEN)) if math.gcd(n, groups) == 1)
        begin = int(round_keys("pool", self._key, first)[0] % np.uint64(max(1, groups)))
        order = (begin + stride * np.arange(groups)) % max(1, groups)
        whole = own[: groups * self._group].reshape(groups, self._group)[order]
        return np.concatenate([whole.ravel(), own[groups * self._group :]])


def _near(number: int) -> list[int]:
    """Return the integers from 1 on, nearest to `number` first."""
    return sorted(range(1, 2 * number + 3), key=lambda other: abs(other - number))


_REPORTED_STEPS = 64
_Rounds = list[list[tuple[NDArray[np.int64], NDArray[np.int64]]]]
"""Rounds of one micro-batch per rank; each micro-batch is (samples of the base stream, lengths)."""


@dataclass(frozen=True)
class PaddingShares:
    """Shares of padding among the positions of a run's first steps."""

    padding_share: float
    plain_padding_share: float
    """The share if micro-batches were in random order, padded to their longest document."""
    full_padding_share: float
    """The share if every document were padded to data.seq_len."""

    def text(self) -> str:
        """Return the shares as text."""
        return (
            f"{self.padding_share:.1%} padding (micro-batches in random order have "
            f"{self.plain_padding_share:.1%}, padded to data.seq_len {self.full_padding_share:.1%})"
        )


class Padded(Stream):
    """A stream of single-document samples, in the order of `pools` if there are any.

    With pools, a step's samples are sorted by length before they are divided, so that each
    micro-batch holds samples of similar length. The step as a whole is the same in every layout.
    """

    def __init__(
        self, base: Stream, pools: Pools | None, *, pad_to: int, by_tokens: bool = False
    ) -> None:
        """`pad_to`: lengths of micro-batches are multiples of this; `by_tokens`: the number of
        positions, not of samples, limits a micro-batch.
        """
        self.base, self.pools = base, pools
        self._pad_to, self._by_tokens = pad_to, by_tokens
        self.document_mask, self.holds_whole_documents = base.document_mask, True
        self.samples = self.at_once = base.samples
        self.seq_len, self.length = base.seq_len, base.length
        self.tokens, self.documents, self.is_masked = base.tokens, base.documents, base.is_masked

    def lengths(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length of each of the (n,) samples in tokens."""
        return self.base.lengths(self._places(samples))

    def tokens_in(self, first_sample: int, count: int) -> int:
        """Return the tokens of `count` samples from `first_sample` on, without padding."""
        return int(self.lengths(first_sample + np.arange(count)).sum())

    def targets_by_source(self, samples: NDArray[np.int64]) -> list[int]:
        """Return the target tokens per source of some samples; empty without a mixture."""
        return self.base.targets_by_source(self._places(samples))

    def targets_of(self, samples: NDArray[np.int64]) -> int:
        """Return the number of target tokens in some samples."""
        return self.base.targets_of(self._places(samples))

    def step_data(self, step: Slice, micro_batch: int, data_rank: int, data_ranks: int) -> StepData:
        """Return one rank's data of a step, with pools the longest documents first; `tokens`
        excludes padding.
        """
        rounds = self._divided(step, micro_batch, data_ranks)
        batches = [self._trimmed(*of_ranks[data_rank]) for of_ranks in rounds]
        return StepData(batches, *self._sizes(rounds))

    def windows_of(self, samples: NDArray[np.int64]) -> list[tuple[Packed, NDArray[np.int64]]]:
        """Return the windows of some samples, by source."""
        return self.base.windows_of(self._places(samples))

    def documents_of(self, index: int) -> list[Document]:
        """Return the documents of the sample at a global index, as tokens."""
        return self.base.documents_of(int(self._places(np.array([index]))[0]))

    def sample(self, index: int) -> Sample:
        """Return the sample at a global index, with its document."""
        sample = self.base.sample(int(self._places(np.array([index]))[0]))
        return replace(sample, batch=self.batch(index, 1))

    def padding_shares(
        self, curriculum: Curriculum, micro_batch: int, data_ranks: int, steps: int
    ) -> PaddingShares:
        """Return the padding of a run's first steps, compared with other ways to batch."""
        plain = Padded(self.base, None, pad_to=self._pad_to)
        counts, samples = np.zeros(4, dtype=np.int64), 0
        for step, _ in zip(curriculum.walk(0), range(min(steps, _REPORTED_STEPS)), strict=False):
            # From pools, a step may read other documents than the same step in random order.
            counts += [
                *self._sizes(self._divided(step, micro_batch, data_ranks)),
                *plain._sizes(plain._divided(step, micro_batch, data_ranks)),
            ]
            samples += step.global_batch
        tokens, positions, plain_tokens, plain_positions = counts.tolist()
        return PaddingShares(
            1 - tokens / max(positions, 1),
            1 - plain_tokens / max(plain_positions, 1),
            1 - tokens / max(samples * self.seq_len, 1),
        )

    def _places(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return samples if self.pools is None else self.pools.places(samples)

    def _divided(self, step: Slice, micro_batch: int, data_ranks: int) -> _Rounds:
        """Return the micro-batches of a step, by round and rank."""
        samples = self._places(step.first_sample + np.arange(step.global_batch))
        lengths = self.base.lengths(samples)
        if self.pools is not None:
            order = np.argsort(-lengths, kind="stable")
            samples, lengths = samples[order], lengths[order]
        if self._by_tokens:
            most = micro_batch * self.seq_len
            bounds = by_tokens(self._positions(lengths).tolist(), most, data_ranks)
            rounds = [bounds[n : n + data_ranks] for n in range(0, len(bounds), data_ranks)]
            return [[(samples[a:b], lengths[a:b]) for a, b in row] for row in rounds]
        shares = [
            share_of_rank(0, len(samples), micro_batch, rank, data_ranks)
            for rank in range(data_ranks)
        ]
        return [[(samples[at], lengths[at]) for at in row] for row in zip(*shares, strict=True)]

    def _sizes(self, rounds: _Rounds) -> tuple[int, int]:
        """Return the total tokens and positions of micro-batches."""
        each = [lengths for of_ranks in rounds for _, lengths in of_ranks]
        tokens = sum(int(lengths.sum()) for lengths in each)
        return tokens, sum(len(lengths) * self._padded(lengths) for lengths in each)

    def _padded(self, lengths: NDArray[np.int64]) -> int:
        """Return the padded length of a micro-batch whose rows have these lengths."""
        return int(self._positions(lengths.max(keepdims=True))[0])

    def _positions(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each length rounded up to a multiple of pad_to, at most seq_len."""
        return np.minimum(-(-lengths // self._pad_to) * self._pad_to, self.seq_len)

    def _read(self, samples: NDArray[np.int64]) -> Batch:
        places = self._places(samples)
        return self._trimmed(places, self.base.lengths(places))

    def _trimmed(self, samples: NDArray[np.int64], lengths: NDArray[np.int64]) -> Batch:
        return self.base._read(samples).trimmed(self._padded(lengths))


def by_tokens(lengths: Sequence[int], most: int, ranks: int) -> list[tuple[int, int]]:
    """Return the bounds of micro-batches of at most `most` positions each.

    `lengths`: row lengths, longest first. Every rank needs the same number of micro-batches, so the
    largest ones are halved until their number is a multiple of `ranks`.
    """
    bounds, first = [], 0
    while first < len(lengths):
        count = min(max(1, most // lengths[first]), len(lengths) - first)
        bounds.append((first, first + count))
        first += count
    while len(bounds) % ranks:
        sizes = [(b - a) * lengths[a] if b - a > 1 else 0 for a, b in bounds]
        at = sizes.index(max(sizes))
        a, b = bounds[at]
        assert b - a > 1, "a step has a sample for each rank at least"
        bounds[at : at + 1] = [(a, (a + b) // 2), ((a + b) // 2, b)]
    return bounds
