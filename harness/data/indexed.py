"""Tokens on disk: Megatron's PREFIX.bin (ids) and PREFIX.idx (place of each document)."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.data.pair import Pair
from harness.data.token_files import TokenFiles
from harness.errors import ConfigError
from harness.files.token_index import HEADER, MAGIC, TYPES

_UINT16, _INT32 = 6, 4
_COPIED_BYTES = 1 << 24


class IndexedTokens:
    """One or more .bin/.idx pairs, of which the documents follow each other.

    Opening checks the headers and the sizes of all files, and raises ConfigError with the sizes in
    bytes.
    """

    def __init__(self, *prefixes: str | Path) -> None:
        try:
            self._pairs = [Pair(prefix) for prefix in prefixes]
        except OSError as error:
            raise ConfigError(
                f"data.path: cannot read {error.filename}: {error.strerror}"
            ) from error
        first = self._pairs[0]
        if other := next((pair for pair in self._pairs if pair.dtype != first.dtype), None):
            raise ConfigError(
                f"data.path: {first.bin_path} holds {first.dtype.name}, {other.bin_path} "
                f"{other.dtype.name}: all pairs of a folder need one type, so write one of them "
                "anew, or name both in data.mix"
            )
        files = [(pair.bin_path, pair.bin_bytes) for pair in self._pairs]
        self.ids = TokenFiles(files, first.dtype) if files[1:] else first.ids()
        self.bin_bytes = self.ids.num_bytes
        self.documents = sum(pair.header.bounds - 1 for pair in self._pairs)
        more = f" and {len(files) - 1:,} more" if files[1:] else ""
        self.name = f"{first.bin_path}{more}"
        """The .bin, for messages."""

    def sizes(self) -> list[tuple[Path, int, int]]:
        """Return the .bin of each pair, its documents and its tokens."""
        return [(pair.bin_path, pair.header.bounds - 1, pair.tokens) for pair in self._pairs]

    def modified_ns(self) -> str:
        """Return the times of modification of all .bin. Raises OSError."""
        return "-".join(str(pair.bin_path.stat().st_mtime_ns) for pair in self._pairs)

    def starts(self) -> Iterator[NDArray[np.int64]]:
        """Yield the bounds of the documents in the .bin, in ids, a block at a time: (n + 1,) of n
        documents, of which the first is the last of the block before.

        Raises ConfigError unless an index describes consecutive documents without gaps.
        """
        base = 0
        for pair in self._pairs:
            for block in pair.starts():
                yield block + base
            base += pair.tokens

    def document_starts(self) -> NDArray[np.int64]:
        """Return the (documents + 1,) bounds of all of starts()."""
        return np.concatenate([np.zeros(1, np.int64), *(block[1:] for block in self.starts())])

    def index_blocks(self) -> Iterator[bytes]:
        """Yield the .idx that a single pair with all documents would have."""
        headers = [pair.header for pair in self._pairs]
        sequences = sum(header.sequences for header in headers)
        yield HEADER.pack(MAGIC, 1, headers[0].code, sequences, self.documents + 1)
        yield from (block.tobytes() for pair in self._pairs for block in pair.column("sizes"))
        base = 0
        for pair in self._pairs:
            yield from ((block + base).tobytes() for block in pair.column("offsets"))
            base += pair.bin_bytes
        base = 0
        for number, pair in enumerate(self._pairs):
            yield from ((of + base).tobytes() for of in pair.column("bounds", int(number > 0)))
            base += pair.header.sequences

    def place_of(self, place: int) -> tuple[Path, int, int]:
        """Return the .bin of an id, and the document there and its offset in that."""
        pair = self._pairs[0]
        if isinstance(self.ids, TokenFiles):
            number = self.ids.file_of(place)
            pair, place = self._pairs[number], place - self.ids.firsts[number]
        before = 0
        for block in pair.starts():
            if place < block[-1]:
                document = int(np.searchsorted(block, place, side="right")) - 1
                return pair.bin_path, before + document, place - int(block[document])
            before += len(block) - 1
        raise AssertionError(f"{pair.bin_path} has no id {place}")


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
