"""The ids of a .bin, read with system calls and not through a memory map.

Through a map, a file that is truncated or cannot be read while a run trains on it kills the process
(SIGBUS) without a message; a short read is an error that names file and sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.errors import ConfigError

# Largest gap between two places, in ids, that one system call reads across.
_GAP = 4096
BLOCK_BYTES = 1 << 23


class TokenFile:
    """A .bin of `num_bytes` bytes of one integer type, open for reading."""

    def __init__(self, path: Path, dtype: np.dtype[np.integer], num_bytes: int) -> None:
        self.path, self.dtype, self.num_bytes = path, dtype, num_bytes
        self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        """Return the number of ids in the file."""
        return self.num_bytes // self.dtype.itemsize

    def read(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids at places in the file, of any shape; fast if the rows ascend.

        Raises ConfigError if the file's size has changed since it was opened.
        """
        self._require_size()
        rows = places.reshape(-1, places.shape[-1])
        if (rows[:, 1:] - rows[:, :-1] == 1).all():  # as most windows are
            ids = np.empty(rows.shape, self.dtype)
            for row, first in zip(ids, rows[:, 0].tolist(), strict=True):
                self._fill(row, first)
        else:
            ids = self._scattered(places.ravel())
        return ids.astype(np.int64).reshape(places.shape)

    def _scattered(self, places: NDArray[np.int64]) -> NDArray[np.integer]:
        """Return the ids at (n,) places, with one read per ascending run without large gaps."""
        steps = np.diff(places)
        firsts = np.r_[0, np.flatnonzero((steps < 0) | (steps > _GAP)) + 1]
        counts = np.diff(firsts, append=len(places))
        lows = places[firsts]
        lengths = places[firsts + counts - 1] + 1 - lows
        begins = np.cumsum(lengths) - lengths
        ids = np.empty(int(lengths.sum()), self.dtype)
        for begin, length, low in zip(
            begins.tolist(), lengths.tolist(), lows.tolist(), strict=True
        ):
            self._fill(ids[begin : begin + length], low)
        picked: NDArray[np.integer] = ids[places + np.repeat(begins - lows, counts)]
        return picked

    def blocks(self) -> Iterator[NDArray[np.integer]]:
        """Yield all ids in order, BLOCK_BYTES at a time."""
        at_once = BLOCK_BYTES // self.dtype.itemsize
        for first in range(0, len(self), at_once):
            yield self.block(first, min(at_once, len(self) - first))

    def block(self, first: int, count: int) -> NDArray[np.integer]:
        """Return `count` ids from `first` on, in the file's type."""
        ids = np.empty(count, self.dtype)
        self._fill(ids, first)
        return ids

    def _fill(self, ids: NDArray[np.integer], first: int) -> None:
        left, offset = ids.data.cast("B"), first * self.dtype.itemsize
        while left:
            try:
                count = os.preadv(self._file.fileno(), [left], offset)
            except OSError as error:
                raise ConfigError(
                    f"data.path: cannot read {self.path} at byte {offset}: {error.strerror}"
                ) from error
            if not count:
                self._require_size()
                raise ConfigError(f"data.path: {self.path} has no byte {offset}")
            left, offset = left[count:], offset + count

    def _require_size(self) -> None:
        """Raise ConfigError if the size changed; every read checks, so all ranks end together."""
        num_bytes = os.fstat(self._file.fileno()).st_size
        if num_bytes != self.num_bytes:
            raise ConfigError(
                f"data.path: {self.path} was changed while the run reads it: it has {num_bytes} "
                f"bytes, {self.num_bytes} when it was opened; restore it and start the run again"
            )
