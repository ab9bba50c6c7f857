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
from harness.data.packed_documents import WholeWindows
from harness.data.packing import Document, Packed, Span
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

    def __init__(self, packed: Packed, seed: int, fingerprint: str, *, document_mask: bool) -> None:
        assert packed.num_windows > 0, "a stream needs at least one window"
        self.packed = packed
        self._seed, self._fingerprint = seed, fingerprint
        self.document_mask = document_mask
        """True if batches carry position_ids, which confine attention to documents."""

    @property
    def holds_whole_documents(self) -> bool:
        """True if each sample holds whole documents and padding."""
        return isinstance(self.packed, WholeWindows)

    @property
    def samples(self) -> int:
        """Number of samples per epoch."""
        return self.packed.num_windows

    @property
    def at_once(self) -> int:
        """Number of samples, none of which continues another; all, except in contiguous text."""
        return self.samples

    @property
    def seq_len(self) -> int:
        """Length of a sample in tokens, with padding."""
        return self.packed.seq_len

    def lengths(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length of each of the (n,) samples in tokens, without padding."""
        if isinstance(self.packed, WholeWindows):
            return self.packed.lengths(self._windows(samples))
        return np.full(len(samples), self.seq_len)

    @property
    def tokens_per_sample(self) -> Fraction:
        """Mean tokens per sample, without padding."""
        padding = self.packed.facts.padding if isinstance(self.packed, WholeWindows) else 0
        return self.packed.seq_len - Fraction(padding, self.samples)

    @property
    def tokens(self) -> int:
        """Number of tokens in the split, with separators and the dropped last window."""
        return self.packed.split.num_tokens

    @property
    def documents(self) -> int:
        """Number of documents that windows are made of."""
        number = self.packed.split.num_documents
        if isinstance(self.packed, WholeWindows):
            facts = self.packed.facts
            number -= facts.without_target + facts.too_long * facts.dropped
        return number

    @property
    def is_masked(self) -> bool:
        """True if the loss mask excludes some tokens, such as prompts or user turns."""
        return self.packed.split.is_masked

    @property
    def length(self) -> int | None:
        """Samples until the stream ends; None if it is endless."""
        return None

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

    def _read(self, samples: NDArray[np.int64]) -> Batch:
        windows = self.packed.read(self._windows(samples))
        arrays = (windows.ids, windows.labels, windows.positions)
        ids, labels, positions = (torch.from_numpy(array) for array in arrays)
        return Batch(ids, labels, positions if self.document_mask else None)


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
