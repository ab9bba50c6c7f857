"""The order of samples by length."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.data.padded import by_tokens
from harness.data.pools import Pools

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 5000).astype(np.int64).clip(1, 512)


def lengths(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    return LENGTHS[samples % len(LENGTHS)]


def pools(pool: int = 256, epoch: int = 1 << 30, end: int | None = None, key: str = "0") -> Pools:
    return Pools(lengths, pool, 8, epoch, end, key)


@pytest.mark.parametrize("end", [None, 1000, 1003, 3])
def test_every_sample_is_read_once_in_its_pool(end: int | None) -> None:
    count = end or 1024
    places = pools(end=end).places(np.arange(count))
    assert sorted(places.tolist()) == list(range(count))
    assert (places // 256 == np.arange(count) // 256).all()


@pytest.mark.parametrize("epoch", [300, 100, 5])
def test_an_epoch_has_every_sample_once(epoch: int) -> None:
    places = pools(epoch=epoch).places(np.arange(3 * epoch)).reshape(3, epoch)
    assert (np.sort(places) == np.arange(3 * epoch).reshape(3, epoch)).all()


@pytest.mark.parametrize("changes", [[100], [256], [5, 700, 701]])
def test_no_pool_has_samples_before_and_after_a_change(changes: list[int]) -> None:
    divided = Pools(lengths, 256, 8, 600, None, "0", changes)
    places = divided.places(np.arange(1200))
    for first, stop in pairwise([0, *changes, 1200]):
        assert sorted(places[first:stop].tolist()) == list(range(first, stop))
    plain = pools(epoch=600).places(np.arange(1200))
    assert (places[856:] == plain[856:]).all()


def test_a_place_alone_determines_its_sample() -> None:
    whole, one_by_one = pools().places(np.arange(900)), pools()
    for place in np.random.default_rng(1).permutation(900)[:100]:
        assert one_by_one.places(np.array([place])) == whole[place]
    assert (pools(key="1").places(np.arange(900)) != whole).any()


def test_groups_are_alike_and_steps_are_not() -> None:
    """A group has neighbours of its pool; steps of six groups differ less than of any six."""
    ordered = lengths(pools(pool=1024).places(np.arange(1024)))
    groups = ordered.reshape(-1, 8)
    assert np.median(groups.max(1) / groups.min(1)) < 1.1
    steps = ordered[:960].reshape(20, 48).mean(1)
    shuffled = np.random.default_rng(3).permuted(np.tile(groups.mean(1), (100, 1)), axis=1)
    assert steps.std() < 0.75 * shuffled[:, :120].reshape(-1, 6).mean(1).std()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_budget_is_kept_and_all_ranks_have_equally_many(ranks: int) -> None:
    draw = np.random.default_rng(2)
    for _ in range(200):
        micro, accum = draw.integers(1, 5), draw.integers(1, 4)
        count = int(micro * accum * ranks)
        rows = sorted(draw.integers(1, 65, count).tolist(), reverse=True)
        bounds = by_tokens(rows, int(micro) * 64, ranks)
        assert len(bounds) % ranks == 0
        assert len(bounds) // ranks <= accum
        assert [0, *(b for _, b in bounds)] == [*(a for a, _ in bounds), count]
        for a, b in bounds:
            assert 0 < (b - a) * rows[a] <= micro * 64
