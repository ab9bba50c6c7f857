"""Token ids in files: written in blocks, and read as if they were one file.

Nothing is memory-mapped. If a mapped file were truncated or became unreadable during training, the
process would die without a message (SIGBUS); a short read raises an error with file and sizes.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from harness.errors import ConfigError


class ArrayFile:
    """A .npy of shape (n,) or (rows, n), initially zero, to which values are appended per row."""

    def __init__(self, path: Path, dtype: str, *shape: int) -> None:
        self._dtype = np.dtype(dtype)
        mapped = np.lib.format.open_memmap(path, mode="w+", dtype=self._dtype, shape=shape)
        begin: int = mapped.offset
        rows = shape[0] if shape[1:] else 1
        self._at = [begin + row * shape[-1] * self._dtype.itemsize for row in range(rows)]
        self._file = path.open("r+b")

    def append(self, values: NDArray[Any], row: int = 0) -> None:
        """Write the next values of a row."""
        block = np.ascontiguousarray(values, dtype=self._dtype)
        self._file.seek(self._at[row])
        self._file.write(block.data)
        self._at[row] += block.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


# Largest gap between two places, in ids, that a single system call reads across.
_GAP = 4096
BLOCK_BYTES = 1 << 23


class TokenFile:
    """A .bin file of `num_bytes` bytes and one integer type, open for reading."""

    def __init__(self, path: Path, dtype: np.dtype[np.integer], num_bytes: int) -> None:
        self.path, self.dtype, self.num_bytes = path, dtype, num_bytes
        self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        """Return the number of ids in the file."""
        return self.num_bytes // self.dtype.itemsize

    def read(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids at `places` in the file; any shape, fast if the rows ascend.

        Raises ConfigError if the file's size has changed since it was opened.
        """
        self._require_size()
        rows = places.reshape(-1, places.shape[-1])
        if (rows[:, 1:] - rows[:, :-1] == 1).all():  # true of most windows
            ids = np.empty(rows.shape, self.dtype)
            for row, first in zip(ids, rows[:, 0].tolist(), strict=True):
                self._fill(row, first)
        else:
            ids = self._scattered(places.ravel())
        return ids.astype(np.int64).reshape(places.shape)

    def _scattered(self, places: NDArray[np.int64]) -> NDArray[np.integer]:
        """Return the ids at (n,) places; reads once per ascending run without large gaps."""
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
        """Return `count` ids from index `first` on, in the file's dtype."""
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
        """Raise ConfigError if the size changed; every read checks, so all ranks stop together."""
        num_bytes = os.fstat(self._file.fileno()).st_size
        if num_bytes != self.num_bytes:
            raise ConfigError(
                f"data.path: {self.path} changed while the run was reading it: it has {num_bytes} "
                f"bytes, but had {self.num_bytes} when it was opened; restore it and restart the "
                "run"
            )


_MOST_OPEN = 128  # shells usually allow 1024 open files per process


class TokenFiles(TokenFile):
    """Files of one integer type, as (path, size in bytes); the most recently read are open.

    If a file changes, the rank that reads it raises an error, which stops the others.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], dtype: np.dtype[np.integer]) -> None:
        self.path, self.dtype = files[0][0].parent, dtype
        sizes = [size for _, size in files]
        self.num_bytes = sum(sizes)
        self.firsts = [0, *accumulate(size // dtype.itemsize for size in sizes)]
        """(files + 1,) index of each file's first id."""

        def opened(number: int) -> TokenFile:
            path, num_bytes = files[number]
            return TokenFile(path, dtype, num_bytes)

        self._opened = lru_cache(_MOST_OPEN)(opened)

    def file_of(self, place: int) -> int:
        """Return the number of the file that holds the id at `place`."""
        return min(bisect_right(self.firsts, place), len(self.firsts) - 1) - 1

    def _fill(self, ids: NDArray[np.integer], first: int) -> None:
        while len(ids):
            number = self.file_of(first)
            count = min(len(ids), self.firsts[number + 1] - first)
            file = self._opened(number)
            file._require_size()
            file._fill(ids[:count], first - self.firsts[number])
            ids, first = ids[count:], first + count

    def _require_size(self) -> None:
        """Do nothing: each file's size is checked when it is read."""
