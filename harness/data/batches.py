"""Samples in training order, as tensors; prepared ahead by a thread."""

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
from harness.data.packing import Document, Packed, Span
from harness.data.whole import WholeWindows
from harness.layout.grid import starts_of

Item = TypeVar("Item")


@dataclass(frozen=True)
class Sample:
    """One training sample, for inspection."""

    epoch: int
    window: int
    spans: list[Span]
    batch: Batch
    """A batch of this one sample."""
    source: int = 0
    """Number of its source in a mixture."""


@dataclass(frozen=True)
class StepData:
    """A rank's micro-batches of a step, and sizes of the whole step."""

    batches: list[Batch]
    tokens: int
    """Tokens of all ranks, as a run counts them."""
    positions: int
    """Positions that all ranks compute."""


def share_of_rank(
    first_sample: int, global_batch: int, micro_batch: int, data_rank: int, data_ranks: int
) -> NDArray[np.int64]:
    """Return the (accumulation, micro_batch) global sample indices of one rank in one step.

    Row j starts at first_sample + (j * data_ranks + data_rank) * micro_batch. Over all ranks and
    rows these are exactly [first_sample, first_sample + global_batch), whatever the split.
    """
    per_round = data_ranks * micro_batch
    assert global_batch % per_round == 0, (
        f"global_batch {global_batch} is no multiple of {data_ranks} ranks x {micro_batch} samples"
    )
    starts = np.array(starts_of(data_rank, data_ranks, global_batch, micro_batch), dtype=np.int64)
    return first_sample + starts[:, None] + np.arange(micro_batch)


class Stream:
    """One split's samples without end: epoch after epoch, each in its own order.

    The global sample index alone determines the window of a sample (order.window_of).
    """

    def __init__(self, packed: Packed, seed: int, fingerprint: str, *, document_mask: bool) -> None:
        assert packed.num_windows > 0, "a stream needs at least one window"
        self.packed = packed
        self._seed, self._fingerprint = seed, fingerprint
        self.document_mask = document_mask
        """True if batches carry position_ids, so that tokens attend within their document."""

    @property
    def holds_whole_documents(self) -> bool:
        """True if a sample holds whole documents and padding."""
        return isinstance(self.packed, WholeWindows)

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return self.packed.num_windows

    @property
    def at_once(self) -> int:
        """Number of samples that do not follow each other: all, but for contiguous text."""
        return self.samples

    @property
    def seq_len(self) -> int:
        """Length of a sample, with its padding."""
        return self.packed.seq_len

    def lengths(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of each of the (n,) samples, without padding."""
        if isinstance(self.packed, WholeWindows):
            return self.packed.lengths(self._windows(samples))
        return np.full(len(samples), self.seq_len)

    @property
    def tokens_per_sample(self) -> Fraction:
        """Mean number of tokens in a sample, without padding."""
        padding = self.packed.facts.padding if isinstance(self.packed, WholeWindows) else 0
        return self.packed.seq_len - Fraction(padding, self.samples)

    @property
    def tokens(self) -> int:
        """Number of tokens in the split, with separators and the dropped incomplete window."""
        return self.packed.split.num_tokens

    @property
    def documents(self) -> int:
        """Number of documents in the split."""
        return self.packed.split.num_documents

    @property
    def is_masked(self) -> bool:
        """True if some tokens are read but not trained on: prompts, the user's turns of a chat."""
        return self.packed.split.is_masked

    @property
    def length(self) -> int | None:
        """Samples until the stream ends; None: without end."""
        return None

    def targets_in(self, first_sample: int, count: int) -> int:
        """Return the target tokens of samples [first_sample, first_sample + count), all ranks."""
        return self.targets_of(first_sample + np.arange(count))

    def tokens_in(self, first_sample: int, count: int) -> int:
        """Return the tokens that a run counts of `count` samples from `first_sample` on."""
        return count * self.seq_len

    def targets_by_source(self, samples: NDArray[np.int64]) -> list[int]:
        """Return the target tokens of each source of a mixture in some samples; else none."""
        return []

    def targets_of(self, samples: NDArray[np.int64]) -> int:
        """Return the target tokens of some samples."""
        return self.packed.targets(self._windows(samples))

    def batch(self, first_sample: int, count: int) -> Batch:
        """Return samples [first_sample, first_sample + count) as one batch.

        Raises ConfigError for a token id outside the model's vocabulary.
        """
        return self._read(first_sample + np.arange(count))

    def first(self, count: int) -> Batch:
        """Return the first samples, `count` or all that there are."""
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
        """Yield one rank's part of every step from samples_consumed on, without end; close() the
        generator."""

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
        """Return one rank's part of a step."""
        share = share_of_rank(
            step.first_sample, step.global_batch, micro_batch, data_rank, data_ranks
        )
        positions = step.global_batch * self.seq_len
        batches = [self._read(samples).cut(step.pieces) for samples in share]
        return StepData(batches, tokens=positions, positions=positions)

    def of_length(self, seq_len: int) -> Stream:
        """Return the split in samples of another length. Raises ConfigError if it has none."""
        packed = self.packed.of_length(seq_len)
        return Stream(packed, self._seed, self._fingerprint, document_mask=self.document_mask)

    def documents_of(self, index: int) -> list[Document]:
        """Return the tokens of the sample at one global index, by document."""
        return self.packed.documents(int(self._windows(np.array([index]))[0]))

    def sample(self, index: int) -> Sample:
        """Return the sample at one global index, with its parts of documents."""
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
    """Yield load(0), load(1), ... from a thread that stays at most `depth` ahead, until closed.

    An exception of `load` is raised here, at its place in the order.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="load_ahead")
    try:
        ahead = deque(pool.submit(load, number) for number in range(depth))
        for number in itertools.count(depth):
            ahead.append(pool.submit(load, number))
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
