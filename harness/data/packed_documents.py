"""Windows that hold whole documents: best-fit packing, the rest padded.

The bins equal those of best-fit decreasing item by item, but the time depends on the number of
distinct sizes, not on the number of items (arXiv 2107.02027 packs histograms in the same way).

A document takes one position per token; its last position has no target. Padding is at the end of a
window. Its positions start at 1, as no document's do, so attention keeps it separate and
`counted_tokens` (models/stage.py) recognises it.
"""

import json
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness.data.cache import cached_array, cached_json, fetch, release
from harness.data.packing import IGNORED, Packed, Windows
from harness.data.pair import BLOCK
from harness.data.token_files import ArrayFile
from harness.errors import ConfigError

_AT_ONCE = 1 << 18


class BestFit:
    """Items of size 1 to `capacity` in bins; each item goes into the fullest bin with room for it.

    Items of equal size are taken in order. The histogram of sizes alone determines the bins, so
    sizes are read in blocks and little is stored per item.
    """

    def __init__(self, counts: NDArray[np.int64], capacity: int) -> None:
        """`counts`: number of items of each size, from 0."""
        self._shelves = _Shelves(capacity)
        for size in np.flatnonzero(counts)[::-1].tolist():
            self._shelves.place(size, int(counts[size]))
        self.items, self.num_bins = int(counts.sum()), self._shelves.num_bins
        ends = np.cumsum(counts)
        self._free, self._next = ends - counts, ends - counts
        self._by_size = np.empty(self.items, dtype=np.int64)

    def add(self, sizes: NDArray[np.int64], items: NDArray[np.int64]) -> None:
        """Add the sizes and the numbers of the next items."""
        order, places = _taken(sizes, self._free)
        self._by_size[places] = items[order]

    def bins(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (items, number of items per bin) of consecutive bins, large items first."""
        for slots, per_bin in self._shelves.contents():
            order, places = _taken(slots, self._next)
            items = np.empty(len(slots), dtype=np.int64)
            items[order] = self._by_size[places]
            yield items, per_bin


def _taken(
    sizes: NDArray[np.int64], free: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the items ordered by size, and in that order the next free place for each one's size.
    Marks these places as taken.
    """
    order = _order(sizes, len(free) - 1)
    counts = np.bincount(sizes, minlength=len(free))
    before = np.cumsum(counts) - counts
    places = np.arange(len(sizes)) + np.repeat(free - before, counts)
    free += counts
    return order, places


def _order(sizes: NDArray[np.int64], largest: int) -> NDArray[np.int64]:
    """Return the stable order by size. Numpy sorts 16-bit keys in linear time."""
    keys = sizes.astype(np.uint16) if largest < 1 << 16 else sizes
    return np.argsort(keys, kind="stable")


class _Shelves:
    """Groups of bins with equal content, by remaining room."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rooms: list[int] = []  # ascending
        self._groups: dict[int, list[tuple[int, int]]] = {}  # room -> (content, bins)
        # A content is a chain: (content before, size, copies of an item of that size).
        self._contents: list[tuple[int, int, int]] = []

    def place(self, size: int, count: int) -> None:
        """Place `count` items of a size no larger than that of any item placed before."""
        while count:
            content, bins, room = self._taken(size)
            copies = room // size
            filled = count // copies if bins is None else min(bins, count // copies)
            if filled:
                self._put((content, size, copies), room - copies * size, filled)
                count -= filled * copies
            left = None if bins is None else bins - filled
            if 0 < count < copies and left != 0:
                self._put((content, size, count), room - count * size, 1)
                count, left = 0, None if left is None else left - 1
            if left:
                self._shelve(content, room, left)

    def _taken(self, size: int) -> tuple[int, int | None, int]:
        """Take the fullest bins with room for `size`, or unlimited empty bins if there are none.

        Return (content, bins, room); `bins` is None if unlimited.
        """
        at = bisect_left(self._rooms, size)
        if at == len(self._rooms):
            return -1, None, self.capacity
        room = self._rooms[at]
        content, bins = self._groups[room].pop()
        if not self._groups[room]:
            del self._groups[room], self._rooms[at]
        return content, bins, room

    def _put(self, content: tuple[int, int, int], room: int, bins: int) -> None:
        self._contents.append(content)
        self._shelve(len(self._contents) - 1, room, bins)

    def _shelve(self, content: int, room: int, bins: int) -> None:
        if room not in self._groups:
            self._groups[room] = []
            insort(self._rooms, room)
        self._groups[room].append((content, bins))

    @property
    def num_bins(self) -> int:
        """Number of bins with items."""
        return sum(bins for groups in self._groups.values() for _, bins in groups)

    def contents(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the sizes of all items, bin by bin, and the number of items per bin."""
        slots: list[NDArray[np.int64]] = []
        per_bin: list[NDArray[np.int64]] = []
        waiting = 0
        for room in self._rooms:
            for content, bins in self._groups[room]:
                sizes = self._sizes(content)
                at_once = max(1, _AT_ONCE // len(sizes))
                for first in range(0, bins, at_once):
                    count = min(at_once, bins - first)
                    slots.append(np.tile(sizes, count))
                    per_bin.append(np.full(count, len(sizes)))
                    waiting += len(slots[-1])
                    if waiting >= _AT_ONCE:
                        yield np.concatenate(slots), np.concatenate(per_bin)
                        slots, per_bin, waiting = [], [], 0
        if slots:
            yield np.concatenate(slots), np.concatenate(per_bin)

    def _sizes(self, content: int) -> NDArray[np.int64]:
        sizes, copies = [], []
        while content >= 0:
            content, size, count = self._contents[content]
            sizes.append(size)
            copies.append(count)
        return np.repeat(np.array(sizes[::-1], np.int64), copies[::-1])


# Increase this if the same documents would give different windows or other counts.
WHOLE_FORMAT = 2
TooLong = Literal["cut", "drop", "refuse"]


@dataclass(frozen=True)
class WholeFacts:
    """Counts of a packing."""

    too_long: int
    """Number of documents longer than a window."""
    dropped: bool
    """True if documents that are too long are dropped; False if they are cut at the end."""
    longest: int
    """Length of the longest document in tokens."""
    without_target: int
    """Number of documents without a token to train on; they are in no window."""
    padding: int
    """Number of padding positions in all windows."""
    learned: int
    """Number of tokens to train on in all windows."""


def write_whole(
    folder: Path, side: str, packed: Packed, too_long: TooLong, *, alone: bool = False
) -> None:
    """Write the windows of one side of a split; `alone`: one document per window."""
    cut, chosen = packed.seq_len, []
    longer = longest = first_longer = without_target = tokens = learned = 0
    counts = np.zeros(cut + 1, dtype=np.int64)
    for rows, lengths in _documents_of(packed):
        is_longer = lengths > cut
        if not longer and is_longer.any():
            first_longer = int(packed.split.numbers[rows[is_longer.argmax()]])
        longer, longest = longer + int(is_longer.sum()), max(longest, int(lengths.max()))
        is_kept = ~is_longer if too_long == "drop" else np.ones(len(rows), dtype=bool)
        num_learned = packed.learned_in(rows, np.minimum(lengths, cut))
        is_learned = num_learned > 0
        without_target += int((~is_learned & is_kept).sum())
        chosen.append(is_learned & is_kept)
        learned += int(num_learned[chosen[-1]].sum())
        sizes = np.minimum(lengths[chosen[-1]], cut)
        counts += np.bincount(sizes, minlength=cut + 1)
        tokens += int(sizes.sum())
    if too_long == "refuse" and longer:
        raise ConfigError(
            f"data.too_long is refuse: {longer:,} of {packed.split.num_documents:,} documents are "
            f"longer than data.seq_len = {cut} tokens (the first is document {first_longer}, the "
            f"longest has {longest:,}): raise data.seq_len, or set data.too_long to cut or drop"
        )
    write = _write_alone if alone else _write_bins
    windows = write(folder / side, packed, chosen, counts)
    padding = windows * cut - tokens
    facts = WholeFacts(longer, too_long == "drop", longest, without_target, padding, learned)
    (folder / f"{side}.json").write_text(json.dumps(asdict(facts)))


def _documents_of(packed: Packed) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield rows and lengths of a side's documents, one block at a time."""
    for first in range(0, packed.split.num_documents, BLOCK):
        starts = np.array(packed.split.starts[first : first + BLOCK + 1])
        yield first + np.arange(len(starts) - 1), np.diff(starts)
        release(packed.split.starts)


def _write_alone(
    path: Path, packed: Packed, chosen: list[NDArray[np.bool_]], counts: NDArray[np.int64]
) -> int:
    """Write one window per chosen document; return their number."""
    windows = int(counts.sum())
    names = (("rows", "i8", 0), ("firsts", "i8", 1), ("lengths", "i4", 0))
    # Lengths are stored contiguously: sorting a pool reads one per document.
    with ExitStack() as stack:
        rows, firsts, lengths = (
            stack.enter_context(ArrayFile(Path(f"{path}.{name}.npy"), dtype, windows + more))
            for name, dtype, more in names
        )
        for (row, length), of_block in zip(_documents_of(packed), chosen, strict=True):
            rows.append(row[of_block])
            lengths.append(np.minimum(length[of_block], packed.seq_len))
        for first in range(0, windows + 1, BLOCK):
            firsts.append(np.arange(first, min(first + BLOCK, windows + 1)))
    return windows


def _write_bins(
    path: Path, packed: Packed, chosen: list[NDArray[np.bool_]], counts: NDArray[np.int64]
) -> int:
    """Write windows of best-fit packed documents; return their number."""
    packing = BestFit(counts, packed.seq_len)
    for (row, length), of_block in zip(_documents_of(packed), chosen, strict=True):
        packing.add(np.minimum(length[of_block], packed.seq_len), row[of_block])
    with (
        ArrayFile(Path(f"{path}.rows.npy"), "i8", packing.items) as rows,
        ArrayFile(Path(f"{path}.firsts.npy"), "i8", packing.num_bins + 1) as firsts,
    ):
        end = 0
        firsts.append(np.zeros(1))
        for items, per_bin in packing.bins():
            rows.append(items)
            ends = end + np.cumsum(per_bin)
            firsts.append(ends)
            end = int(ends[-1])
    return packing.num_bins


class WholeWindows(Packed):
    """One split's documents in the windows that write_whole made."""

    holds_whole_documents = True

    def __init__(
        self,
        folder: Path,
        side: str,
        *,
        alone: bool = False,
        chosen: NDArray[np.int64] | None = None,
        **documents: Any,
    ) -> None:
        """`chosen`: for preference pairs, the number of tokens of each document's first side, by
        its number in the corpus. `documents`: the arguments of Packed.
        """
        super().__init__(**documents)
        self.chosen, self.reference = chosen, np.zeros((0, 2))
        if chosen is not None:
            self.reference = np.full((self.split.num_documents, 2), np.nan)
        self._lengths: NDArray[np.int32] | None = None
        if alone:
            self._lengths = cached_array(folder / f"{side}.lengths.npy", np.dtype("i4"))
        facts = cached_json(folder / f"{side}.json", lambda values: WholeFacts(**values))
        self.facts = facts
        self.padding = facts.padding
        self.num_documents -= facts.without_target + facts.too_long * facts.dropped
        self._rows = cached_array(folder / f"{side}.rows.npy", np.dtype("i8"))
        self._firsts = cached_array(folder / f"{side}.firsts.npy", np.dtype("i8"))
        self.num_windows = len(self._firsts) - 1

    def counts(self) -> str:
        """Return documents left out and the padding share, as text."""
        text = f"{self.padding / max(1, self.num_windows * self.seq_len):.2%} padding"
        if count := self.facts.without_target:
            text += f", {count:,} documents without a token to learn left out"
        return text

    def of_length(self, seq_len: int) -> Packed:
        """Raise ConfigError: the windows were made for one length."""
        raise ConfigError(
            f"eval.seq_len is {seq_len}, but samples hold whole documents: set data.packing=stream"
        )

    def read(self, windows: NDArray[np.int64]) -> Windows:
        """Return the (n,) windows. Raises ConfigError for an id outside the vocabulary."""
        rows, window, lengths, columns = self._documents_in(windows)
        ends = np.cumsum(lengths)
        offsets = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        places = np.repeat(window * self.seq_len + columns, lengths) + offsets
        row_of = np.repeat(rows, lengths)
        ids = self._ids(row_of, offsets)
        labels = np.where(self._is_masked(row_of, offsets), IGNORED, ids)
        labels = np.append(labels[1:], IGNORED)
        labels[ends - 1] = IGNORED  # the next token belongs to another document
        shape = (len(windows), self.seq_len)
        used = np.bincount(window, lengths, len(windows)).astype(np.int64)
        read = Windows(
            np.full(shape, self._eos_id),
            np.full(shape, IGNORED),
            np.arange(1, self.seq_len + 1) - used[:, None],
        )
        for array, values in zip(
            (read.ids, read.labels, read.positions), (ids, labels, offsets), strict=True
        ):
            array.reshape(-1)[places] = values
        return self._with_sides(read, rows, window, lengths, columns) if self.is_paired else read

    @property
    def is_paired(self) -> bool:
        """True if each document is a preference pair."""
        return self.chosen is not None

    def _with_sides(
        self, read: Windows, rows: NDArray[np.int64], *places: NDArray[np.int64]
    ) -> Windows:
        """Return windows in which the sides of each pair are documents of their own. `places`:
        index of the window, length and column of each pair.
        """
        assert self.chosen is not None, "other documents have no sides"
        segments = np.full(read.ids.shape, -1)
        middles = self.chosen[self.split.numbers[rows]]
        for pair, (window, length, column, middle) in enumerate(
            zip(*(each.tolist() for each in (*places, middles)), strict=True)
        ):
            segments[window, column : column + middle] = 2 * pair
            segments[window, column + middle : column + length] = 2 * pair + 1
            read.positions[window, column + middle : column + length] -= middle
            read.labels[window, column + middle - 1] = IGNORED  # the next token is another side's
        return replace(read, segments=segments, reference=self.reference[rows])

    def pairs_in(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the split rows of the pairs in the (n,) windows, as segments number them."""
        return self._documents_in(windows)[0]

    def targets(self, windows: NDArray[np.int64]) -> int:
        """Return the number of targets in the (n,) windows, tokens or pairs, without reading
        tokens.
        """
        rows, _, lengths, _ = self._documents_in(windows)
        if self.is_paired:
            return len(rows)
        return int(self.learned_in(rows, lengths).sum())

    def lengths(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length of each of the (n,) windows in tokens, without padding."""
        if self._lengths is not None:
            fetch(self._lengths, windows)
            return self._lengths[windows].astype(np.int64)
        _, window, lengths, _ = self._documents_in(windows)
        return np.bincount(window, lengths, len(windows)).astype(np.int64)

    def _parts(self, window: int) -> tuple[NDArray[np.int64], ...]:
        """Return split row, first token, last token and column of each document in a window."""
        rows, _, lengths, columns = self._documents_in(np.array([window]))
        return rows, np.zeros_like(rows), lengths, columns

    def _documents_in(
        self, windows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return split row, index among `windows`, length and column of the documents."""
        firsts = self._firsts[windows]
        counts = self._firsts[windows + 1] - firsts
        befores = np.cumsum(counts) - counts
        window = np.repeat(np.arange(len(windows)), counts)
        rows = self._rows[np.arange(len(window)) + np.repeat(firsts - befores, counts)]
        lengths = np.minimum(self.split.starts[rows + 1] - self.split.starts[rows], self.seq_len)
        begins = np.cumsum(lengths) - lengths
        return rows, window, lengths, begins - begins[befores][window]
