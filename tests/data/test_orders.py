"""Orders of samples, pure functions of their numbers: permutations, pools, shares, packing."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.data import packed_documents
from harness.data.mixture import MOST_PERIOD, MixOrder, Phase, one_period, weights_of
from harness.data.order import permute, reservoir, round_keys, window_of
from harness.data.packed_documents import BestFit
from harness.data.padded import Pools, by_tokens
from tests.data.batchings import PROPERTY

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 5000).astype(np.int64).clip(1, 512)


@PROPERTY
@given(size=st.integers(1, 5000), seed=st.integers(0, 9))
def test_windows_of_an_epoch_are_a_permutation(size: int, seed: int) -> None:
    whole = window_of(np.arange(2 * size), size, seed, "f")
    assert (np.sort(whole.reshape(2, size), axis=1) == np.arange(size)).all()
    for first in (0, size // 2, 2 * size - 1):  # in whatever batch they are requested
        part = np.arange(first, min(2 * size, first + 20))
        assert window_of(part, size, seed, "f").tolist() == whole[part].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 4097, 65_536, 70_001])
def test_any_size_has_permutations(size: int) -> None:
    images = permute(np.arange(size), size, round_keys(0))
    assert np.array_equal(np.sort(images), np.arange(size))


def test_sample_orders_match_recorded_values() -> None:
    """A run that is resumed years later, with another numpy, must read the same samples."""
    first_epoch = window_of(np.arange(8), 1000, seed=0, fingerprint="abc")
    assert first_epoch.tolist() == [150, 682, 883, 963, 764, 992, 32, 474]
    other = [
        window_of(np.array([5]), 1000, seed=1, fingerprint="abc").item(),
        window_of(np.array([5]), 1000, seed=0, fingerprint="abd").item(),
        window_of(np.array([1005]), 1000, seed=0, fingerprint="abc").item(),
    ]
    assert other == [723, 603, 203]
    huge = permute(np.array([0, 1, 10**12 - 1]), 10**12, round_keys("huge"))
    assert huge.tolist() == [424531519484, 222880761245, 51453860463]


def test_shuffle_separates_neighbouring_windows() -> None:
    """As in a random permutation: no runs, no drift, all residues, little serial correlation."""
    size = 100_003
    images = permute(np.arange(size), size, round_keys("spread"))
    gaps = np.abs(np.diff(images))
    assert gaps.mean() == pytest.approx(size / 3, rel=0.02)
    assert (gaps < size // 1000).mean() < 0.005
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(size), images)[0, 1]) < 0.02
    places = np.bincount(images[: size // 10] * 20 // size, minlength=20)
    assert places.min() > 0.8 * places.mean()
    assert (images == np.arange(size)).sum() < 10
    epochs = window_of(np.arange(3000), 1000, seed=0, fingerprint="f").reshape(3, 1000)
    assert all((one == other).mean() < 0.01 for one, other in pairwise([*epochs, epochs[0]]))
    assert len({tuple(permute(np.arange(3), 3, round_keys(seed))) for seed in range(200)}) == 6


def lengths(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    return LENGTHS[samples % len(LENGTHS)]


def pools(
    epoch: int = 1 << 30, end: int | None = None, *, key: str = "0", pool: int = 256
) -> Pools:
    return Pools(lengths, pool, 8, epoch, end, key)


@PROPERTY
@given(
    epoch=st.integers(5, 700),
    changes=st.lists(st.integers(1, 799), max_size=3, unique=True).map(sorted),
    cut=st.one_of(st.none(), st.integers(1, 799)),
    seed=st.integers(0, 9),
)
def test_samples_are_read_once(epoch: int, changes: list[int], cut: int | None, seed: int) -> None:
    """No pool crosses the end of an epoch, a change of a mixture's shares, or the stream's end."""
    changes = [change for change in changes if cut is None or change < cut]
    ordered = Pools(lengths, 256, 8, epoch, cut, "0", changes)
    end = cut or 800  # without an end of the stream, the last pool extends beyond it
    places = ordered.places(np.arange(end))
    bounds = {*range(0, end, epoch), *changes, cut or 0}
    bounds |= {start + at for start in range(0, end, epoch) for at in range(0, epoch, 256)}
    for first, stop in pairwise(sorted(bound for bound in bounds if bound <= end)):
        assert sorted(places[first:stop].tolist()) == list(range(first, stop))
    again = Pools(lengths, 256, 8, epoch, cut, "0", changes)
    for place in np.random.default_rng(seed).integers(0, end, 5):
        assert again.places(np.array([place])) == places[place]  # a position alone determines it


def test_pools_after_a_change_are_those_without_it() -> None:
    plain = pools(600).places(np.arange(1200))
    changed = Pools(lengths, 256, 8, 600, None, "0", [5, 100]).places(np.arange(1200))
    assert (changed[256:] == plain[256:]).all()
    assert (pools(600, key="1").places(np.arange(1200)) != plain).any()


def test_groups_are_alike_and_steps_are_not() -> None:
    """A group has neighbours from its pool; steps of six groups differ less than random ones."""
    ordered = lengths(pools(pool=1024).places(np.arange(1024)))
    groups = ordered.reshape(-1, 8)
    assert np.median(groups.max(1) / groups.min(1)) < 1.1
    steps = ordered[:960].reshape(20, 48).mean(1)
    shuffled = np.random.default_rng(3).permuted(np.tile(groups.mean(1), (100, 1)), axis=1)
    assert steps.std() < 0.75 * shuffled[:, :120].reshape(-1, 6).mean(1).std()


@PROPERTY
@given(
    layout=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)), seed=st.integers(0)
)
def test_budget_is_kept_and_ranks_read_alike(layout: tuple[int, int, int], seed: int) -> None:
    ranks, micro, accumulation = layout
    count = ranks * micro * accumulation
    rows = sorted(np.random.default_rng(seed).integers(1, 65, count).tolist(), reverse=True)
    bounds = by_tokens(rows, micro * 64, ranks)
    assert len(bounds) % ranks == 0
    assert len(bounds) // ranks <= accumulation
    assert [0, *(b for _, b in bounds)] == [*(a for a, _ in bounds), count]
    assert all(0 < (b - a) * rows[a] <= micro * 64 for a, b in bounds)


def shares(*values: float) -> tuple[Fraction, ...]:
    return tuple(Fraction(str(value)) for value in values)


SHARES = st.lists(st.integers(1, 1000).map(lambda n: Fraction(n, 1000)), min_size=1, max_size=8)


@PROPERTY
@given(wanted=SHARES)
def test_any_prefix_has_its_shares_within_one_sample(wanted: list[Fraction]) -> None:
    weights = weights_of(wanted)
    if sum(weights) < MOST_PERIOD:
        assert [Fraction(w, sum(weights)) for w in weights] == [s / sum(wanted) for s in wanted]
    samples = min(2 * sum(weights) + 5, 20_000)
    order = MixOrder([Phase(0, tuple(wanted))], [None] * len(wanted))
    sources, _ = order.places(np.arange(samples))
    drawn = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    ideal = np.arange(1, samples + 1)[:, None] * np.array(weights)  # times the period
    assert np.abs(drawn * sum(weights) - ideal).max() < sum(weights)


@PROPERTY
@given(
    wanted=SHARES, change=st.integers(1, 900), seed=st.integers(0), limited=st.integers(0, 1 << 8)
)
def test_sources_have_no_gaps(wanted: list[Fraction], change: int, seed: int, limited: int) -> None:
    """Also across limits and changes, and the same one by one as all at once."""
    draw = np.random.default_rng(seed)
    limits = [int(draw.integers(1, 400)) if limited >> n & 1 else None for n in range(len(wanted))]
    phases = [Phase(0, tuple(wanted)), Phase(change, tuple(wanted[::-1]))]
    order = MixOrder(phases, limits)
    assert (order.length is None) == (None in limits)
    count = 2000 if order.length is None else min(2000, order.length)
    sources, within = order.places(np.arange(count))
    for source, limit in enumerate(limits):
        read = within[sources == source]
        assert read.tolist() == [*range(len(read))]
        assert limit is None or len(read) <= limit
    for sample in draw.integers(0, count, 20).tolist():
        one = order.places(np.array([sample]))
        assert (one[0].item(), one[1].item()) == (sources[sample], within[sample])
        drawn = np.bincount(sources[:sample], minlength=len(limits))
        assert order.drawn_before(sample) == drawn.tolist()
    if order.length is not None and order.length <= 2000:
        assert np.bincount(sources, minlength=len(limits)).tolist() == limits


def test_shares_of_a_mixture_in_numbers() -> None:
    order = MixOrder([Phase(0, shares(0.5, 0.3, 0.2))], [4, None, None])
    sources, _ = order.places(np.arange(1000))
    after = sources[order.parts[1].first :]
    assert ((sources == 0).sum(), order.length) == (4, None)  # the other sources get its share
    assert abs((after == 1).sum() - 0.6 * len(after)) < 1
    order = MixOrder([Phase(0, shares(0.9, 0.1)), Phase(800, shares(0.5, 0.5))], [None, None])
    sources, _ = order.places(np.arange(1000))
    assert [(sources[:800] == 1).sum(), (sources[800:] == 1).sum()] == [80, 100]
    order = MixOrder([Phase(0, shares(0.7, 0.3))], [None, None])  # far samples need no iteration
    assert [place.item() for place in order.places(np.array([10**15]))] == [0, 7 * 10**14]
    assert one_period((1,)).tolist() == [0]
    assert one_period((1, 0, 2)).tolist() == [2, 0, 2]


def test_shares_without_a_short_period_are_rounded() -> None:
    weights = weights_of((Fraction(1, 3), Fraction(1, 1_000_003), Fraction(2, 7)))
    assert sum(weights) == MOST_PERIOD
    assert weights[1] == 1
    assert weights[0] / weights[2] == pytest.approx(7 / 6, rel=1e-3)
    assert weights_of(shares(0.7, 0.2)) == (7, 2)


def bins_of(sizes: Sequence[int], capacity: int, at_once: int = 7) -> list[list[int]]:
    """Return the items of each bin."""
    packing = BestFit(np.bincount(sizes, minlength=1), capacity)
    for first in range(0, len(sizes), at_once):
        here = np.array(sizes[first : first + at_once])
        packing.add(here, first + np.arange(len(here)))
    halves = ((items, np.cumsum(per_bin)[:-1]) for items, per_bin in packing.bins())
    bins = [part.tolist() for items, ends in halves for part in np.split(items, ends)]
    assert packing.num_bins == len(bins)
    return bins


def item_by_item(sizes: Sequence[int], capacity: int) -> list[int]:
    """Return how full each bin is if every item in turn goes where the least room is left."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms[rooms.index(min(fitting))] -= size
        else:
            rooms.append(capacity - size)
    return sorted(capacity - room for room in rooms)


@pytest.mark.parametrize("at_once", [1, 2, 3, 9])
@PROPERTY
@given(sizes=st.lists(st.integers(1, 40), max_size=80), room=st.integers(0, 20))
def test_bins_are_those_of_best_fit_decreasing(at_once: int, sizes: list[int], room: int) -> None:
    capacity = max(sizes, default=1) + room
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_documents, "_AT_ONCE", at_once)
        bins = bins_of(sizes, capacity)
    assert all(bins)
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    filled = sorted(sum(sizes[item] for item in items) for items in bins)
    assert filled == item_by_item(sizes, capacity)


def test_best_fit_bins_are_nearly_full_and_keep_ties_in_order() -> None:
    """Chats of 20 to 4,096 tokens, in a tenth of a second on one core."""
    assert bins_of([3, 5, 3, 3, 5], 8) == [[1, 0], [4, 2], [3]]
    sizes = np.random.default_rng(0).lognormal(5.5, 1.0, 100_000).astype(np.int64).clip(20, 4096)
    assert sizes.sum() / (4096 * len(bins_of(sizes.tolist(), 4096, 30_000))) > 0.999


def test_a_reservoir_keeps_every_sample_as_often() -> None:
    """2,000 draws of 20 out of 200: each sample 200 times, within five standard deviations."""
    assert reservoir(8, 5, "a").tolist() == [0, 1, 2, 3, 4]
    assert reservoir(8, 8, "a").tolist() == [*range(8)]
    counts = np.zeros(200)
    for key in range(2000):
        kept = reservoir(20, 200, str(key))
        assert len(set(kept.tolist())) == 20
        counts[kept] += 1
    assert np.abs(counts - 200).max() < 5 * np.sqrt(2000 * 0.1 * 0.9)


def test_reservoir_replaces_only_by_later_samples() -> None:
    before = set(reservoir(64, 1000, "a").tolist())
    for seen in range(1001, 2000):
        after = set(reservoir(64, seen, "a").tolist())
        assert after - before <= {seen - 1}
        before = after
    assert (reservoir(64, 10**9, "a") < 10**9).all()
