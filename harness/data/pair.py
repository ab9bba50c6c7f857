"""Tokens on disk: Megatron's PREFIX.bin (ids) and PREFIX.idx (documents), and masks.

The index is not memory-mapped: pages read for 10 million documents would stay in a rank's memory.
"""

import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness.data.cache import cached_array, damaged
from harness.data.token_files import TokenFile, TokenFiles
from harness.errors import ConfigError
from harness.files.kept_sample import masks_of
from harness.files.token_index import HEADER, MAGIC, TYPES, read_header

BLOCK = 1 << 18
"""Sequences or documents to process at a time."""
Document = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Token ids, and a mask that is True for the tokens that are trained on."""


class Pair:
    """PREFIX.bin and PREFIX.idx, checked for matching sizes. Raises ConfigError and OSError."""

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

    def column(
        self, name: Literal["sizes", "offsets", "bounds"], first: int = 0
    ) -> Iterator[NDArray[Any]]:
        """Yield a column of the index, starting at entry `first`, BLOCK entries at a time."""
        for at in range(first, self._columns[name][2], BLOCK):
            yield self._read(name, at, BLOCK)

    def starts(self) -> Iterator[NDArray[np.int64]]:
        """Yield the document bounds in the .bin, in ids, one block at a time. A block of n
        documents has n + 1 bounds, the first of which is the last of the previous block.
        """
        last = 0
        for starts in self._bounds_in_ids():
            if len(starts):
                yield np.append(np.int64(last), starts)
                last = int(starts[-1])

    def _bounds_in_ids(self) -> Iterator[NDArray[np.int64]]:
        """Yield the end of each document, in ids, one block at a time."""
        bounds, before = self._checked_bounds(), 0  # before: sequences in earlier blocks
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
        """Yield the (n + 1,) bounds, in ids, of the n sequences of each block."""
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
        """Yield the end of each document, in sequences."""
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
        """Raise ConfigError if the .bin has one value per token but of a different width."""
        code, dtype = self.header.code, self.dtype
        tokens = sum(int(np.sum(block, dtype=np.int64)) for block in self.column("sizes"))
        for width in (1, 2, 4, 8):
            if width != dtype.itemsize and tokens * width == self.bin_bytes:
                raise ConfigError(
                    f"{self.bin_path} has {width} bytes per token, but type {code} in "
                    f"{self.idx_path.name} is {dtype.name}, with {dtype.itemsize}"
                    + ("; in Megatron-LM it is a float, not a token id" if code in (6, 7) else "")
                    + ": write the ids as int32 (or as uint16 if there are fewer than 65,500)"
                )

    def _require_size(self, path: Path, num_bytes: int, expected: int) -> None:
        if num_bytes != expected:
            raise ConfigError(
                f"{path} is {'truncated' if num_bytes < expected else 'too long'}: {num_bytes} "
                f"bytes, but {self.idx_path.name} describes {expected}"
            )


@dataclass(frozen=True)
class Masks:
    """The masked runs of a .bin in ascending order, as memory maps of (runs + 1,).

    The first run is empty and at place 0, so that every place has a run at or before it. If no
    token is masked, it is the only run.
    """

    starts: NDArray[np.int64]
    """Index in the .bin of each run's first token."""
    stops: NDArray[np.int64]
    """Index in the .bin just after each run's last token."""
    totals: NDArray[np.int64]
    """Number of masked tokens in this run and all earlier runs."""

    def at(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each masked place in the .bin; any shape, fast if the rows ascend."""
        return places < self.stops[self._run_of(places)]

    def before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of masked tokens before each place in the .bin; any shape."""
        runs = self._run_of(places)
        left: NDArray[np.int64] = np.maximum(self.stops[runs] - places, 0)
        return self.totals[runs] - left

    def _run_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the last run that starts at or before each place."""
        runs: NDArray[np.int64] = np.searchsorted(self.starts, places, side="right") - 1
        return runs


NO_MASKS = Masks(*np.zeros((3, 1), dtype=np.int64))


class MaskWriter:
    """Collects the masked runs of documents, added in order; 16 bytes per run."""

    def __init__(self) -> None:
        self._starts, self._stops = array("q", [0]), array("q", [0])
        self._tokens = 0

    def add(self, count: int, *, masked: bool) -> None:
        """Add the next tokens of the .bin."""
        count = max(0, count)
        if masked and count:
            if self._stops[-1] == self._tokens and len(self._stops) > 1:
                self._stops[-1] += count
            else:
                self._starts.append(self._tokens)
                self._stops.append(self._tokens + count)
        self._tokens += count

    def add_learned(self, count: int, learned: list[tuple[int, int]]) -> None:
        """Add the next tokens of the .bin, all masked except ascending runs (start, stop)."""
        at = 0
        for start, stop in learned:
            self.add(start - at, masked=True)
            at = max(start, at)  # one token may span the end of a run and the start of the next
            self.add(stop - at, masked=False)
            at = max(stop, at)
        self.add(count - at, masked=True)

    def save(self, path: Path) -> None:
        """Write the runs for load_masks."""
        starts, stops = (np.asarray(column) for column in (self._starts, self._stops))
        np.save(path, np.stack([starts, stops, np.cumsum(stops - starts)]))


def join_masks(parts: Iterable[tuple[Masks, int]], path: Path) -> None:
    """Write the masks of consecutive parts of a .bin, given with their tokens, as one file."""
    columns, before = [np.zeros((2, 0), dtype=np.int64)], 0
    for masks, tokens in parts:
        columns.append(np.stack([masks.starts[1:], masks.stops[1:]]) + before)
        before += tokens
    starts, stops = np.concatenate(columns, axis=1)
    is_apart = stops[:-1] != starts[1:]  # a run may continue in the next part
    if starts.size:
        starts, stops = starts[np.r_[True, is_apart]], stops[np.r_[is_apart, True]]
    starts, stops = np.r_[0, starts], np.r_[0, stops]
    np.save(path, np.stack([starts, stops, np.cumsum(stops - starts)]))


def load_masks(path: Path) -> Masks:
    """Open a MaskWriter's file in a finished folder. Raises ConfigError if it is damaged."""
    columns = cached_array(path, np.dtype("i8"), rows=3)
    if not columns.size:
        raise damaged(path, f"it holds {columns.shape} {columns.dtype}")
    return Masks(*columns)


_UINT16, _INT32 = 6, 4
_COPIED_BYTES = 1 << 24


class IndexedTokens:
    """One or more .bin/.idx pairs whose documents follow one another.

    Opening checks the headers and sizes of all files. Raises ConfigError, with the sizes in bytes.
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
                f"{other.dtype.name}: all pairs of a folder need the same type, so rewrite one of "
                "them, or list both in data.mix"
            )
        files = [(pair.bin_path, pair.bin_bytes) for pair in self._pairs]
        self.ids = TokenFile(first.bin_path, first.dtype, first.bin_bytes)
        if files[1:]:
            self.ids = TokenFiles(files, first.dtype)
        self.bin_bytes = self.ids.num_bytes
        self.documents = sum(pair.header.bounds - 1 for pair in self._pairs)
        more = f" and {len(files) - 1:,} more" if files[1:] else ""
        self.name = f"{first.bin_path}{more}"
        """Name of the .bin, for messages."""

    def sizes(self) -> list[tuple[Path, int, int]]:
        """Return .bin, number of documents and number of tokens of each pair."""
        return [(pair.bin_path, pair.header.bounds - 1, pair.tokens) for pair in self._pairs]

    def modified_ns(self) -> str:
        """Return the modification times of all .bin files, in nanoseconds. Raises OSError."""
        return "-".join(str(pair.bin_path.stat().st_mtime_ns) for pair in self._pairs)

    def starts(self) -> Iterator[NDArray[np.int64]]:
        """Yield the document bounds in the .bin, in ids, one block at a time. A block of n
        documents has n + 1 bounds, the first of which is the last of the previous block.

        Raises ConfigError unless the index describes consecutive documents without gaps.
        """
        base = 0
        for pair in self._pairs:
            for block in pair.starts():
                yield block + base
            base += pair.tokens

    def index_blocks(self) -> Iterator[bytes]:
        """Yield the bytes of the .idx that a single pair with all documents would have."""
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
            yield from (
                (block + base).tobytes() for block in pair.column("bounds", int(number > 0))
            )
            base += pair.header.sequences

    def place_of(self, place: int) -> tuple[Path, int, int]:
        """Return the .bin that holds an id, its document, and its offset in that document."""
        pair, before = self._pairs[0], 0
        if isinstance(self.ids, TokenFiles):
            number = self.ids.file_of(place)
            pair, place = self._pairs[number], place - self.ids.firsts[number]
        for block in pair.starts():
            if place < block[-1]:
                document = int(np.searchsorted(block, place, side="right")) - 1
                return pair.bin_path, before + document, place - int(block[document])
            before += len(block) - 1
        raise AssertionError(f"{pair.bin_path} has no id {place}")


def bytes_per_id(vocab_size: int) -> int:
    """Return the bytes of an id on disk: 2 (uint16) if the vocabulary has fewer than 65,500 ids, as
    in Megatron-LM, otherwise 4 (int32).
    """
    return 2 if vocab_size < 65500 else 4


def write_indexed(
    prefix: Path, vocab_size: int, sequences: Iterable[tuple[Sequence[int], bool]]
) -> None:
    """Stream (ids, True at the end of a document) into a .bin/.idx pair.

    Only 12 bytes per sequence are held in memory.
    """
    code = _UINT16 if bytes_per_id(vocab_size) == 2 else _INT32
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
    """Join the pairs of consecutive parts of a corpus into one, as a single call of write_indexed
    would.

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


def write_documents(prefix: Path, vocab_size: int, documents: Iterable[Document]) -> int:
    """Write documents as a .bin/.idx pair with a mask file beside it; return their number."""
    masks, count = MaskWriter(), 0

    def sequences() -> Iterable[tuple[list[int], bool]]:
        nonlocal count
        for ids, learned in documents:
            turns = np.flatnonzero(np.diff(learned, prepend=False, append=False)).reshape(-1, 2)
            masks.add_learned(len(ids), [(start, stop) for start, stop in turns.tolist()])
            count += 1
            yield ids.tolist(), True

    write_indexed(prefix, vocab_size, sequences())
    masks.save(masks_of(prefix))
    return count
