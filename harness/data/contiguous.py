"""Contiguous streams of text: the sample order for training with carried state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from harness.data.batch import Batch
from harness.data.batches import Stream
from harness.data.packing import IGNORED, Packed

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

    @property
    def samples(self) -> int:
        """Number of samples per epoch."""
        return self._rows * self._length

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
    window only to build up the state; none of its targets count.
    """

    def __init__(self, packed: Packed, samples: int) -> None:
        samples = min(samples, packed.num_windows)
        rows = max(1, min(EVALUATED_ROWS, samples // LEAST_LENGTH))
        super().__init__(packed, rows, samples // rows)

    @property
    def at_once(self) -> int:
        """Number of samples that can be evaluated together: one per stream."""
        return self._rows

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
