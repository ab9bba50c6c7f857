"""Against best-fit decreasing, item by item."""

from __future__ import annotations

import numpy as np
import pytest

from harness.data import best_fit as module
from harness.data.best_fit import BestFit


class Bins:
    """Items by bin: those of bin b are items[firsts[b] : firsts[b + 1]]."""

    def __init__(self, sizes: np.ndarray, capacity: int, at_once: int = 7) -> None:
        packing = BestFit(np.bincount(sizes, minlength=1), capacity)
        for first in range(0, len(sizes), at_once):
            here = sizes[first : first + at_once]
            packing.add(here, first + np.arange(len(here)))
        parts = [*packing.bins()]
        self.items = np.concatenate([items for items, _ in parts] or [np.empty(0, int)])
        per_bin = np.concatenate([count for _, count in parts] or [np.empty(0, int)])
        self.firsts = np.r_[0, np.cumsum(per_bin, dtype=np.int64)]
        assert packing.num_bins == len(per_bin)


def item_by_item(sizes: list[int], capacity: int) -> list[int]:
    """The filling of every bin, when each item in turn goes where the least room is left."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms[rooms.index(min(fitting))] -= size
        else:
            rooms.append(capacity - size)
    return sorted(capacity - room for room in rooms)


@pytest.mark.parametrize("seed", range(60))
def test_the_bins_are_those_of_best_fit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 1 + seed % 9)
    draw = np.random.default_rng(seed)
    capacity = int(draw.integers(2, 40))
    sizes = draw.integers(1, capacity + 1, int(draw.integers(1, 80)))
    bins = Bins(sizes, capacity)
    assert sorted(bins.items.tolist()) == list(range(len(sizes)))
    filled = [
        sizes[bins.items[first:end]].tolist()
        for first, end in zip(bins.firsts, bins.firsts[1:], strict=False)
    ]
    assert all(filled)
    assert sorted(map(sum, filled)) == item_by_item(sizes.tolist(), capacity)


def test_items_of_one_size_are_taken_in_order() -> None:
    bins = Bins(np.array([3, 5, 3, 3, 5]), 8)
    assert bins.items.tolist() == [1, 0, 4, 2, 3]
    assert bins.firsts.tolist() == [0, 2, 4, 5]


def test_no_item_needs_no_bin() -> None:
    bins = Bins(np.empty(0, np.int64), 8)
    assert (len(bins.items), bins.firsts.tolist()) == (0, [0])


def test_bins_of_many_items_are_nearly_full() -> None:
    """Chats of 20 to 4,096 tokens, at a tenth of a second on one core."""
    draw = np.random.default_rng(0)
    sizes = np.clip(draw.lognormal(5.5, 1.0, 100_000).astype(np.int64), 20, 4096)
    bins = Bins(sizes, 4096, 30_000)
    assert sizes.sum() / (4096 * (len(bins.firsts) - 1)) > 0.999
