"""A .bin/.idx pair: its header, and its index read a block at a time.

No memory map: what building an index reads of 10 million documents would stay in a rank's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness.data.token_file import TokenFile
from harness.errors import ConfigError
from harness.files.token_index import HEADER, TYPES, read_header

BLOCK = 1 << 18
"""Sequences or documents at a time."""


class Pair:
    """PREFIX.bin and PREFIX.idx, whose sizes fit each other. Raises ConfigError, and OSError."""

    def __init__(self, prefix: str | Path) -> None:
        self.bin_path, self.idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self.bin_bytes = self.bin_path.stat().st_size
        self.header = header = read_header(self.idx_path)
        offsets_at = HEADER.size + 4 * header.sequences
        bounds_at = offsets_at + 8 * header.sequences
        self._columns = {
            "sizes": ("<i4", HEADER.size, header.sequences),
            "offsets": ("<i8", offsets_at, header.sequences),
            "bounds": ("<i8", bounds_at, header.bounds),
        }
        self._require_size(self.idx_path, header.num_bytes, bounds_at + 8 * header.bounds)
        self.dtype = np.dtype(TYPES[header.code])
        last = header.sequences - 1
        end = int(self._read("offsets", last)[0])
        end += int(self._read("sizes", last)[0]) * self.dtype.itemsize
        if self.bin_bytes != end:
            self._require_width()
        self._require_size(self.bin_path, self.bin_bytes, end)
        if not end:
            raise ConfigError(f"{self.bin_path} is empty (0 bytes)")
        self.tokens = self.bin_bytes // self.dtype.itemsize

    def ids(self) -> TokenFile:
        """Open the .bin."""
        return TokenFile(self.bin_path, self.dtype, self.bin_bytes)

    def column(
        self, name: Literal["sizes", "offsets", "bounds"], first: int = 0
    ) -> Iterator[NDArray[Any]]:
        """Yield a column of the index from an entry on, BLOCK entries at a time."""
        for at in range(first, self._columns[name][2], BLOCK):
            yield self._read(name, at, BLOCK)

    def starts(self) -> Iterator[NDArray[np.int64]]:
        """Yield the bounds of the documents in the .bin, in ids, a block at a time: (n + 1,) of n
        documents, of which the first is the last of the block before.
        """
        last = 0
        for starts in self._bounds_in_ids():
            if len(starts):
                yield np.append(np.int64(last), starts)
                last = int(starts[-1])

    def _bounds_in_ids(self) -> Iterator[NDArray[np.int64]]:
        """Yield the end of each document, in ids, a block at a time."""
        bounds, before = self._checked_bounds(), 0  # before: sequences in the blocks before
        left = next(bounds)
        for starts in self._checked_starts():
            stop = before + len(starts) - 1
            while True:
                here = int(np.searchsorted(left, stop, side="right"))
                yield starts[left[:here] - before]
                if here < len(left):
                    left = left[here:]
                    break
                following = next(bounds, None)
                if following is None:
                    return
                left = following
            before = stop

    def _checked_starts(self) -> Iterator[NDArray[np.int64]]:
        """Yield the (n + 1,) places of the n sequences of a block, and the end."""
        total, before = 0, 0
        for sizes, offsets in zip(self.column("sizes"), self.column("offsets"), strict=True):
            starts: NDArray[np.int64] = np.cumsum(np.append(np.int64(total), sizes))
            displaced = (sizes < 0) | (offsets != starts[:-1] * self.dtype.itemsize)
            if displaced.any():
                at = int(displaced.argmax())
                raise ConfigError(
                    f"{self.idx_path}: sequence {before + at} has {sizes[at]} tokens at byte "
                    f"{offsets[at]}: the sequences do not follow each other"
                )
            yield starts
            total, before = int(starts[-1]), before + len(sizes)

    def _checked_bounds(self) -> Iterator[NDArray[np.int64]]:
        """Yield the end of each document in sequences."""
        sequences, bounds = self.header.sequences, self.header.bounds
        ends = int(self._read("bounds", 0)[0]), int(self._read("bounds", bounds - 1)[0])
        last, is_ordered = 0, ends == (0, sequences)
        for block in self.column("bounds", 1):
            if not is_ordered or (np.diff(block, prepend=last) < 0).any():
                raise ConfigError(
                    f"{self.idx_path}: its documents run from sequence {ends[0]} to {ends[1]} of "
                    f"{sequences}, or are out of order"
                )
            yield block
            last = int(block[-1])

    def _read(self, name: str, first: int, count: int = 1) -> NDArray[Any]:
        dtype, at, length = self._columns[name]
        count = min(count, length - first)
        offset = at + first * int(dtype[-1])
        try:
            values = np.fromfile(self.idx_path, dtype, count, offset=offset)
        except OSError as error:
            raise ConfigError(
                f"data.path: cannot read {self.idx_path}: {error.strerror}"
            ) from error
        if len(values) < count:
            size = self.idx_path.stat().st_size
            self._require_size(self.idx_path, size, self.header.num_bytes)
        return values

    def _require_width(self) -> None:
        """Raise ConfigError if the .bin has a value per token, but of another width."""
        code, dtype = self.header.code, self.dtype
        tokens = sum(int(np.sum(block, dtype=np.int64)) for block in self.column("sizes"))
        for width in (1, 2, 4, 8):
            if width != dtype.itemsize and tokens * width == self.bin_bytes:
                raise ConfigError(
                    f"{self.bin_path} has {width} bytes a token, but type {code} in "
                    f"{self.idx_path.name} is {dtype.name}, of {dtype.itemsize}"
                    + ("; in Megatron-LM it is a float, and no token id" if code in (6, 7) else "")
                    + ": write the ids as int32 (or uint16 below 65,500 of them)"
                )

    def _require_size(self, path: Path, num_bytes: int, expected: int) -> None:
        if num_bytes != expected:
            raise ConfigError(
                f"{path} is {'truncated' if num_bytes < expected else 'too long'}: {num_bytes} "
                f"bytes, where {self.idx_path.name} describes {expected}"
            )
