"""Tokens on disk: Megatron's PREFIX.bin (ids) and PREFIX.idx (place of each document)."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.data.token_file import TokenFile
from harness.errors import ConfigError
from harness.files.token_index import HEADER, MAGIC, TYPES, read_header

_UINT16, _INT32 = 6, 4
_COPIED_BYTES = 1 << 24


class IndexedTokens:
    """A .bin/.idx pair: `ids` reads the .bin, the .idx is a memory map.

    Opening checks the header and the sizes of both files, and raises ConfigError with the sizes in
    bytes.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.bin_path, self.idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        try:
            self.bin_bytes = self.bin_path.stat().st_size
            self._open()
        except OSError as error:
            raise ConfigError(
                f"data.path: cannot read {error.filename}: {error.strerror}"
            ) from error

    def _open(self) -> None:
        header = read_header(self.idx_path)
        offsets_at = HEADER.size + 4 * header.sequences
        bounds_at = offsets_at + 8 * header.sequences
        self._require_size(self.idx_path, header.num_bytes, bounds_at + 8 * header.bounds)
        index = np.asarray(np.memmap(self.idx_path, dtype=np.uint8, mode="r"))
        self._sizes = index[HEADER.size : offsets_at].view("<i4")
        self._offsets = index[offsets_at:bounds_at].view("<i8")
        self._bounds = index[bounds_at:].view("<i8")
        dtype = np.dtype(TYPES[header.code])
        end = int(self._offsets[-1]) + int(self._sizes[-1]) * dtype.itemsize
        if self.bin_bytes != end:
            self._require_width(dtype, header.code)
        self._require_size(self.bin_path, self.bin_bytes, end)
        if not end:
            raise ConfigError(f"{self.bin_path} is empty (0 bytes)")
        self.ids = TokenFile(self.bin_path, dtype, self.bin_bytes)

    def _require_width(self, dtype: np.dtype[np.integer], code: int) -> None:
        """Raise ConfigError if the .bin has a value per token, but of another width."""
        tokens = int(np.sum(self._sizes, dtype=np.int64))
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

    def document_starts(self) -> NDArray[np.int64]:
        """Return the (documents + 1,) start of each document in the .bin, and the end, in ids.

        Reads the whole index. Raises ConfigError unless it describes consecutive documents without
        gaps.
        """
        starts: NDArray[np.int64] = np.r_[0, np.cumsum(self._sizes, dtype=np.int64)]
        itemsize = self.ids.dtype.itemsize
        displaced = (self._sizes < 0) | (self._offsets != starts[:-1] * itemsize)
        if displaced.any():
            at = int(displaced.argmax())
            raise ConfigError(
                f"{self.idx_path}: sequence {at} has {self._sizes[at]} tokens at byte "
                f"{self._offsets[at]}: the sequences do not follow each other"
            )
        ends = (self._bounds[0], self._bounds[-1])
        if ends != (0, len(self._sizes)) or (np.diff(self._bounds) < 0).any():
            raise ConfigError(
                f"{self.idx_path}: its documents run from sequence {ends[0]} to {ends[1]} of "
                f"{len(self._sizes)}, or are out of order"
            )
        bounds: NDArray[np.int64] = starts[self._bounds]
        return bounds


def write_indexed(
    prefix: Path, vocab_size: int, sequences: Iterable[tuple[Sequence[int], bool]]
) -> None:
    """Write (ids, True at the end of a document) as a .bin/.idx pair, as a stream.

    The ids are uint16 below 65,500 of them, as in Megatron-LM, otherwise int32. Only 12 bytes per
    sequence are held in memory.
    """
    code = _UINT16 if vocab_size < 65500 else _INT32
    dtype = np.dtype(TYPES[code])
    sizes, bounds = array("i"), array("q", [0])
    with Path(f"{prefix}.bin").open("wb") as file:
        for ids, ends_document in sequences:
            file.write(np.array(ids, dtype=dtype).tobytes())
            sizes.append(len(ids))
            if ends_document:
                bounds.append(len(sizes))
    _write_index(Path(f"{prefix}.idx"), code, np.asarray(sizes), np.asarray(bounds))


def _write_index(
    path: Path, code: int, sizes: NDArray[np.integer], bounds: NDArray[np.integer]
) -> None:
    itemsize = np.dtype(TYPES[code]).itemsize
    offsets = np.r_[0, np.cumsum(sizes, dtype=np.int64)[:-1]] * itemsize
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(bounds)))
        for column, width in ((sizes, "<i4"), (offsets, "<i8"), (bounds, "<i8")):
            file.write(np.asarray(column, dtype=width).tobytes())


def join_indexed(parts: Sequence[Path], prefix: Path) -> None:
    """Write the pairs of consecutive parts of a corpus as one: that of a single write_indexed.

    A part may be empty. Raises OSError.
    """
    codes, sizes, bounds, sequences = set(), [], [np.zeros(1, dtype="<i8")], 0
    with Path(f"{prefix}.bin").open("wb") as joined:
        for part in parts:
            with Path(f"{part}.bin").open("rb") as file:
                shutil.copyfileobj(file, joined, _COPIED_BYTES)
            index = Path(f"{part}.idx").read_bytes()
            *_, code, count, documents = HEADER.unpack_from(index)
            codes.add(code)
            sizes.append(np.frombuffer(index, "<i4", count, HEADER.size))
            ends = np.frombuffer(index, "<i8", documents, HEADER.size + 12 * count)[1:]
            bounds.append(ends + sequences)
            sequences += count
    assert len(codes) == 1, "one vocabulary, one width"
    _write_index(Path(f"{prefix}.idx"), codes.pop(), np.concatenate(sizes), np.concatenate(bounds))
