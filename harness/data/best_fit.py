"""Best-fit decreasing over a histogram: items of equal size are placed together.

The bins are those of best-fit decreasing item by item, but the time depends on the number of
different sizes and not on the number of items (arXiv 2107.02027 packs histograms likewise).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 1 << 18


class BestFit:
    """Items of 1 to `capacity` each in bins, each in the fullest bin with room for it.

    Items of equal size are taken in order. The same sizes give the same bins: a histogram alone
    places them, so that sizes are read a block at a time, and little is held of each item.
    """

    def __init__(self, counts: NDArray[np.int64], capacity: int) -> None:
        """`counts`: items of each size, from 0."""
        self._shelves = _Shelves(capacity)
        for size in np.flatnonzero(counts)[::-1].tolist():
            self._shelves.place(size, int(counts[size]))
        self.items, self.num_bins = int(counts.sum()), self._shelves.num_bins
        ends = np.cumsum(counts)
        self._free, self._next = ends - counts, ends - counts
        self._by_size = np.empty(self.items, dtype=np.int64)

    def add(self, sizes: NDArray[np.int64], items: NDArray[np.int64]) -> None:
        """Add the sizes of the next items, and their numbers."""
        order, places = _taken(sizes, self._free)
        self._by_size[places] = items[order]

    def bins(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (items, number of them in each bin) of consecutive bins, large items first."""
        for slots, per_bin in self._shelves.contents():
            order, places = _taken(slots, self._next)
            items = np.empty(len(slots), dtype=np.int64)
            items[order] = self._by_size[places]
            yield items, per_bin


def _taken(
    sizes: NDArray[np.int64], free: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the order of items by size, and the next free place of each one's size, in that order;
    they are no longer free.
    """
    order = _order(sizes, len(free) - 1)
    counts = np.bincount(sizes, minlength=len(free))
    before = np.cumsum(counts) - counts
    places = np.arange(len(sizes)) + np.repeat(free - before, counts)
    free += counts
    return order, places


def _order(sizes: NDArray[np.int64], largest: int) -> NDArray[np.int64]:
    """Return the stable order by size; of 16 bits numpy sorts in linear time."""
    keys = sizes.astype(np.uint16) if largest < 1 << 16 else sizes
    return np.argsort(keys, kind="stable")


class _Shelves:
    """Groups of bins with equal content, by the room that is left in each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rooms: list[int] = []  # ascending
        self._groups: dict[int, list[tuple[int, int]]] = {}  # room -> (content, bins)
        # A content is a chain: (content before, size, copies of an item of that size).
        self._contents: list[tuple[int, int, int]] = []

    def place(self, size: int, count: int) -> None:
        """Place `count` items of a size that no item placed before was below."""
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
        """Take the fullest bins with room for `size`; empty bins without number if there are none.

        Return (content, bins, room).
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
        """Bins with items."""
        return sum(bins for groups in self._groups.values() for _, bins in groups)

    def contents(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the sizes of all items, bin by bin, and the number of items in each bin, of about
        _AT_ONCE items at a time.
        """
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
