"""Samples as contiguous streams of text: the order of training with a carried state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from harness.data.batch import Batch
from harness.data.batches import Stream
from harness.data.packing import Packed


class Contiguous(Stream):
    """One split cut into `rows` streams of equally many windows; each step reads one of each.

    Row r of step k reads window r * length + k, where length = windows // rows: the text that
    follows its last one. Windows beyond rows * length are left out, every epoch has this order.
    """

    def __init__(self, packed: Packed, rows: int) -> None:
        assert 0 < rows <= packed.num_windows, "a stream needs at least one window"
        super().__init__(packed, 0, "", document_mask=False)
        self._rows, self._length = rows, packed.num_windows // rows

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return self._rows * self._length

    def _windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        steps, rows = np.divmod(samples, self._rows)
        windows: NDArray[np.int64] = rows * self._length + steps % self._length
        return windows

    def _read(self, samples: NDArray[np.int64]) -> Batch:
        windows = self._windows(samples)
        goes_on = torch.from_numpy(~self.packed.begin_documents(windows))
        batch = super()._read(samples)
        return replace(batch, windows=torch.from_numpy(windows), goes_on=goes_on)
