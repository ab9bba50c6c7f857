"""Samples in training order, as tensors, prefetched by a thread."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from harness.config.batch import Curriculum, Slice
from harness.data.batch import Batch
from harness.data.order import window_of
from harness.data.packing import IGNORED, Document, Packed, Span
from harness.layout.grid import starts_of

Item = TypeVar("Item")


@dataclass(frozen=True)
class Sample:
    """One training sample, for inspection."""

    epoch: int
    window: int
    spans: list[Span]
    batch: Batch
    """A batch of this sample alone."""
    source: int = 0
    """Index of its source in a mixture."""


@dataclass(frozen=True)
class StepData:
    """One rank's micro-batches of a step, and totals of the whole step."""

    batches: list[Batch]
    tokens: int
    """Tokens of all ranks, as the run counts them."""
    positions: int
    """Positions that all ranks compute, with padding."""


def share_of_rank(
    first_sample: int, global_batch: int, micro_batch: int, data_rank: int, data_ranks: int
) -> NDArray[np.int64]:
    """Return the (accumulation, micro_batch) global sample indices of one rank in one step.

    Row j starts at first_sample + (j * data_ranks + data_rank) * micro_batch. Over all ranks and
    rows the indices are exactly [first_sample, first_sample + global_batch), for every split.
    """
    per_round = data_ranks * micro_batch
    assert global_batch % per_round == 0, (
        f"global_batch {global_batch} is not a multiple of {data_ranks} ranks x {micro_batch} "
        "samples"
    )
    starts = np.array(starts_of(data_rank, data_ranks, global_batch, micro_batch), dtype=np.int64)
    return first_sample + starts[:, None] + np.arange(micro_batch)


class Stream:
    """An endless stream of one split's samples; each epoch has its own order.

    A sample's window depends only on its global index (order.window_of).
    """

    document_mask: bool
    """True if batches carry position_ids, which confine attention to documents."""
    holds_whole_documents: bool
    """True if the samples (of some source) hold whole documents and padding."""
    samples: int
    """Number of samples per epoch."""
    at_once: int
    """Number of consecutive samples of which none continues another: all, except in HeldOutText."""
    seq_len: int
    """Length of a sample in tokens, with padding."""
    length: int | None = None
    """Samples until the stream ends; None if it is endless."""
    tokens: int
    """Number of tokens in the split, including separators and the incomplete last window, which is
    dropped.
    """
    documents: int
    """Number of documents that windows are made of."""
    is_masked: bool
    """True if the loss mask excludes some tokens, such as prompts or user turns."""

    def __init__(self, packed: Packed, seed: int, fingerprint: str, *, document_mask: bool) -> None:
        assert packed.num_windows > 0, "a stream needs at least one window"
        self.packed, self.document_mask = packed, document_mask
        self._seed, self._fingerprint = seed, fingerprint
        self.samples = self.at_once = packed.num_windows
        self.seq_len, self.documents = packed.seq_len, packed.num_documents
        self.tokens, self.is_masked = packed.split.num_tokens, packed.split.is_masked
        self.holds_whole_documents = packed.holds_whole_documents

    @property
    def tokens_per_sample(self) -> Fraction:
        """Mean tokens per sample, without padding."""
        return self.packed.seq_len - Fraction(self.packed.padding, self.samples)

    def lengths(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length of each of the (n,) samples in tokens, without padding."""
        return self.packed.lengths(self._windows(samples))

    def targets_in(self, first_sample: int, count: int) -> int:
        """Return the target tokens, over all ranks, of `count` samples from `first_sample` on."""
        return self.targets_of(first_sample + np.arange(count))

    def tokens_in(self, first_sample: int, count: int) -> int:
        """Return the tokens that a run counts for `count` samples from `first_sample` on."""
        return count * self.seq_len

    def targets_by_source(self, samples: NDArray[np.int64]) -> list[int]:
        """Return the target tokens per source of some samples; empty without a mixture."""
        return []

    def targets_of(self, samples: NDArray[np.int64]) -> int:
        """Return the number of target tokens in some samples."""
        return self.packed.targets(self._windows(samples))

    def batch(self, first_sample: int, count: int) -> Batch:
        """Return samples [first_sample, first_sample + count) as one batch.

        Raises ConfigError for a token id outside the model's vocabulary.
        """
        return self._read(first_sample + np.arange(count))

    def first(self, count: int) -> Batch:
        """Return the first `count` samples, or all if the epoch has fewer."""
        return self.batch(0, min(count, self.samples))

    def steps(
        self,
        samples_consumed: int,
        *,
        curriculum: Curriculum,
        micro_batch: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> Generator[StepData]:
        """Yield one rank's data for every step from `samples_consumed` on, without end. The caller
        closes the generator.
        """

        ahead = curriculum.walk(samples_consumed)

        def load(_number: int) -> StepData:  # by one thread, in order
            data = self.step_data(next(ahead), micro_batch, data_rank, data_ranks)
            if not pin_memory:
                return data
            return replace(data, batches=[batch.pinned() for batch in data.batches])

        return load_ahead(load, prefetch)

    def micro_batches(
        self, step: Slice, micro_batch: int, data_rank: int, data_ranks: int
    ) -> list[Batch]:
        """Return one rank's micro-batches of a step."""
        return self.step_data(step, micro_batch, data_rank, data_ranks).batches

    def step_data(self, step: Slice, micro_batch: int, data_rank: int, data_ranks: int) -> StepData:
        """Return one rank's data of a step."""
        share = share_of_rank(
            step.first_sample, step.global_batch, micro_batch, data_rank, data_ranks
        )
        positions = step.global_batch * self.seq_len
        batches = [self._read(samples).cut(step.pieces) for samples in share]
        return StepData(batches, tokens=positions, positions=positions)

    def of_length(self, seq_len: int) -> Stream:
        """Return the split with another sequence length. Raises ConfigError if it has no window."""
        packed = self.packed.of_length(seq_len)
        return Stream(packed, self._seed, self._fingerprint, document_mask=self.document_mask)

    def documents_of(self, index: int) -> list[Document]:
        """Return the documents of the sample at a global index, as tokens."""
        return self.packed.documents(int(self._windows(np.array([index]))[0]))

    def sample(self, index: int) -> Sample:
        """Return the sample at a global index, with the document spans it holds."""
        window = int(self._windows(np.array([index]))[0])
        spans = self.packed.spans(window)
        return Sample(index // self.samples, window, spans, self.batch(index, 1))

    def _windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return window_of(samples, self.samples, self._seed, self._fingerprint)

    def windows_of(self, samples: NDArray[np.int64]) -> list[tuple[Packed, NDArray[np.int64]]]:
        """Return the windows of some samples, by source."""
        return [(self.packed, self._windows(samples))]

    def _read(self, samples: NDArray[np.int64]) -> Batch:
        return batch_of(self.packed, self._windows(samples), self.document_mask)


def batch_of(packed: Packed, windows: NDArray[np.int64], document_mask: bool) -> Batch:
    """Return (n,) windows as one batch. Raises ConfigError for an id outside the vocabulary."""
    read = packed.read(windows)
    arrays = (read.ids, read.labels, read.positions)
    ids, labels, positions = (torch.from_numpy(array) for array in arrays)
    batch = Batch(ids, labels, positions if document_mask else None)
    if read.segments is None or read.reference is None:
        return batch
    reference = torch.from_numpy(read.reference).float()
    return replace(batch, segments=torch.from_numpy(read.segments), reference=reference)


EVALUATED_ROWS, LEAST_LENGTH = 64, 16
"""Maximum streams in an evaluation, and minimum windows per stream if there are several."""


class Contiguous(Stream):
    """One split divided into `rows` streams of equal length; each step reads one window of each.

    Row r of step k reads window r * length + k, with length = windows // rows, which continues the
    row's previous window. Windows beyond rows * length are dropped. Every epoch has this order.
    """

    def __init__(self, packed: Packed, rows: int, most: int | None = None) -> None:
        """`most`: number of windows to read from the start of each stream; None: all."""
        assert 0 < rows <= packed.num_windows, "a stream needs at least one window"
        super().__init__(packed, 0, "", document_mask=False)
        self._rows, self._stride = rows, packed.num_windows // rows
        self._length = self._stride if most is None else min(most, self._stride)
        self.samples = self.at_once = rows * self._length

    def _windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        steps, rows = np.divmod(samples, self._rows)
        windows: NDArray[np.int64] = rows * self._stride + steps % self._length
        return windows

    def _read(self, samples: NDArray[np.int64]) -> Batch:
        windows = self._windows(samples)
        goes_on = torch.from_numpy(~self.packed.begin_documents(windows))
        batch = super()._read(samples)
        return replace(batch, windows=torch.from_numpy(windows), goes_on=goes_on)


class HeldOutText(Contiguous):
    """The samples of an evaluation, as contiguous streams taken from across the held-out text.

    The number of streams depends only on the number of samples, so the held-out loss is the same in
    every layout and comparable between runs. A stream that starts inside a document reads its first
    window only to build up the state; the targets of that window do not count.
    """

    def __init__(self, packed: Packed, samples: int) -> None:
        samples = min(samples, packed.num_windows)
        rows = max(1, min(EVALUATED_ROWS, samples // LEAST_LENGTH))
        super().__init__(packed, rows, samples // rows)
        self.at_once = rows

    def first(self, count: int) -> Batch:
        """Return the first `count` samples of the first stream."""
        return self._read(np.arange(min(count, self._length)) * self._rows)

    def targets_of(self, samples: NDArray[np.int64]) -> int:
        """Return the number of target tokens in some samples."""
        counted = ~self._only_read(samples)
        return super().targets_of(samples[counted]) if counted.any() else 0

    def _read(self, samples: NDArray[np.int64]) -> Batch:
        batch = super()._read(samples)
        assert batch.goes_on is not None, "a contiguous stream knows where documents begin"
        batch.labels[torch.from_numpy(self._only_read(samples))] = IGNORED
        return replace(batch, goes_on=batch.goes_on & ~torch.from_numpy(self._is_first(samples)))

    def _only_read(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each sample whose preceding state is missing."""
        within: NDArray[np.bool_] = ~self.packed.begin_documents(self._windows(samples))
        return self._is_first(samples) & within

    def _is_first(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each sample that is the first of its stream."""
        first: NDArray[np.bool_] = samples // self._rows % self._length == 0
        return first


def load_ahead(load: Callable[[int], Item], depth: int) -> Generator[Item]:
    """Yield load(0), load(1), ... from a thread that runs at most `depth` ahead, until closed.

    An exception in `load` is raised here in place of its item.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="load_ahead")
    try:
        ahead = deque(pool.submit(load, number) for number in range(depth))
        for number in itertools.count(depth):
            ahead.append(pool.submit(load, number))
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
