"""Samples in training order, as tensors; prepared ahead by a thread."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from harness.config.curriculum import Curriculum
from harness.data.order import window_of
from harness.data.packing import Packed, Span
from harness.layout.share import starts_of

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the CPU, (micro_batch, seq_len) int64 each."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    """Already shifted: labels[i] is the target of position i, or -100."""
    position_ids: torch.Tensor | None
    """Positions from 0 in each document if tokens attend only within it; otherwise None."""

    def cut(self, pieces: int) -> Batch:
        """Return the same tokens as `pieces` times as many sequences, each shorter by that factor.

        Equals the batch that packing to the shorter length gives.
        """
        if pieces == 1:
            return self
        rows, positions = len(self.labels) * pieces, self.position_ids
        if positions is not None:
            # A document continued from the previous piece restarts at 0: its place in the piece.
            # A document that begins inside the piece has a smaller position there and keeps it.
            positions = positions.view(rows, -1)
            positions = torch.minimum(positions, torch.arange(positions.shape[1]))
        return Batch(self.input_ids.view(rows, -1), self.labels.view(rows, -1), positions)

    def pinned(self) -> Batch:
        """Return a copy in page-locked memory, from which a device can copy asynchronously."""
        positions = self.position_ids
        return Batch(
            self.input_ids.pin_memory(),
            self.labels.pin_memory(),
            None if positions is None else positions.pin_memory(),
        )

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the three tensors on a device, copied asynchronously."""
        positions = self.position_ids
        return (
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            None if positions is None else positions.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class Sample:
    """One training sample, for inspection."""

    epoch: int
    window: int
    spans: list[Span]
    batch: Batch
    """A batch of this one sample."""


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
        self._packed = packed
        self._seed, self._fingerprint = seed, fingerprint
        self.document_mask = document_mask
        """True if batches carry position_ids, so that tokens attend within their document."""

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return self._packed.num_windows

    @property
    def tokens(self) -> int:
        """Number of tokens in the split, with separators and the dropped incomplete window."""
        return self._packed.split.num_tokens

    @property
    def documents(self) -> int:
        """Number of documents in the split."""
        return self._packed.split.num_documents

    @property
    def masks_prompts(self) -> bool:
        """True if some tokens are prompts, which are read but not trained on."""
        return self._packed.split.masks_prompts

    def targets_in(self, first_sample: int, count: int) -> int:
        """Return the target tokens of samples [first_sample, first_sample + count), all ranks."""
        return self._packed.targets(self._windows(first_sample + np.arange(count)))

    def batch(self, first_sample: int, count: int) -> Batch:
        """Return samples [first_sample, first_sample + count) as one batch.

        Raises ConfigError for a token id outside the model's vocabulary.
        """
        return self._read(first_sample + np.arange(count))

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
    ) -> Generator[list[Batch]]:
        """Yield one rank's micro-batches (share_of_rank) of every step from samples_consumed on,
        without end; close() the generator."""

        ahead = curriculum.walk(samples_consumed)

        def load(_number: int) -> list[Batch]:  # by one thread, in order
            step = next(ahead)
            share = share_of_rank(
                step.first_sample, step.global_batch, micro_batch, data_rank, data_ranks
            )
            batches = [self._read(samples).cut(step.pieces) for samples in share]
            return [batch.pinned() for batch in batches] if pin_memory else batches

        return load_ahead(load, prefetch)

    def sample(self, index: int) -> Sample:
        """Return the sample at one global index, with its parts of documents."""
        window = int(self._windows(np.array([index]))[0])
        spans = self._packed.spans(window)
        return Sample(index // self.samples, window, spans, self.batch(index, 1))

    def _windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return window_of(samples, self.samples, self._seed, self._fingerprint)

    def _read(self, samples: NDArray[np.int64]) -> Batch:
        windows = self._packed.read(self._windows(samples))
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
