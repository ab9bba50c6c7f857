"""Samples as contiguous streams of text: the order in which a carried state reads them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from harness.data.batch import Batch
from harness.data.batches import Stream
from harness.data.packing import IGNORED, Packed

EVALUATED_ROWS, LEAST_LENGTH = 64, 16
"""Most streams of an evaluation, and the fewest windows of each where there are several."""


class Contiguous(Stream):
    """One split cut into `rows` streams of equally many windows; each step reads one of each.

    Row r of step k reads window r * length + k, where length = windows // rows: the text that
    follows its last one. Windows beyond rows * length are left out, every epoch has this order.
    """

    def __init__(self, packed: Packed, rows: int, most: int | None = None) -> None:
        """`most`: windows that are read of each stream, from its first on; None: all."""
        assert 0 < rows <= packed.num_windows, "a stream needs at least one window"
        super().__init__(packed, 0, "", document_mask=False)
        self._rows, self._stride = rows, packed.num_windows // rows
        self._length = self._stride if most is None else min(most, self._stride)

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
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
    """The samples of an evaluation, as contiguous streams from all over the held-out text.

    Their number follows from the samples alone, so that the held-out loss is the same in every
    layout, and comparable between runs. A stream that begins within a document reads its first
    window for the state behind it: none of its targets count.
    """

    def __init__(self, packed: Packed, samples: int) -> None:
        samples = min(samples, packed.num_windows)
        rows = max(1, min(EVALUATED_ROWS, samples // LEAST_LENGTH))
        super().__init__(packed, rows, samples // rows)

    @property
    def at_once(self) -> int:
        """Number of samples that do not follow each other: one of each stream."""
        return self._rows

    def first(self, count: int) -> Batch:
        """Return the first `count` samples of the first stream."""
        return self._read(np.arange(min(count, self._length)) * self._rows)

    def targets_of(self, samples: NDArray[np.int64]) -> int:
        """Return the target tokens of some samples."""
        counted = ~self._only_read(samples)
        return super().targets_of(samples[counted]) if counted.any() else 0

    def _read(self, samples: NDArray[np.int64]) -> Batch:
        batch = super()._read(samples)
        assert batch.goes_on is not None, "a contiguous stream knows where documents begin"
        batch.labels[torch.from_numpy(self._only_read(samples))] = IGNORED
        return replace(batch, goes_on=batch.goes_on & ~torch.from_numpy(self._is_first(samples)))

    def _only_read(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each sample that lacks the state before it."""
        within: NDArray[np.bool_] = ~self.packed.begin_documents(self._windows(samples))
        return self._is_first(samples) & within

    def _is_first(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each sample that is its stream's first."""
        first: NDArray[np.bool_] = samples // self._rows % self._length == 0
        return first
