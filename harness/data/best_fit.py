"""Best-fit decreasing over a histogram: items of equal size are placed together.

The bins are those of best-fit decreasing item by item, but the time depends on the number of
different sizes and not on the number of items (arXiv 2107.02027 packs histograms likewise).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Bins:
    """Items by bin: those of bin b are items[firsts[b] : firsts[b + 1]], large ones first."""

    items: NDArray[np.int64]
    firsts: NDArray[np.int64]
    """(bins + 1,)"""


def best_fit(sizes: NDArray[np.int64], capacity: int) -> Bins:
    """Place items of 1 to `capacity` each into bins, each into the fullest bin with room for it.

    Items of equal size are taken in order. The same sizes give the same bins.
    """
    shelves = _Shelves(capacity)
    counts = np.bincount(sizes, minlength=1)
    for size in np.flatnonzero(counts)[::-1].tolist():
        shelves.place(size, int(counts[size]))
    slots, per_bin = shelves.contents()
    items = np.empty(len(sizes), dtype=np.int64)
    items[_order(slots, capacity)] = _order(sizes, capacity)
    return Bins(items, np.r_[0, np.cumsum(per_bin, dtype=np.int64)])


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

    def contents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sizes of all items, bin by bin, and the number of items in each bin."""
        slots, per_bin = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for room in self._rooms:
            for content, bins in self._groups[room]:
                sizes = self._sizes(content)
                slots.append(np.tile(sizes, bins))
                per_bin.append(np.full(bins, len(sizes)))
        return np.concatenate(slots), np.concatenate(per_bin)

    def _sizes(self, content: int) -> NDArray[np.int64]:
        sizes, copies = [], []
        while content >= 0:
            content, size, count = self._contents[content]
            sizes.append(size)
            copies.append(count)
        return np.repeat(np.array(sizes[::-1], np.int64), copies[::-1])
