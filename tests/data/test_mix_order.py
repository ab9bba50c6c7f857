"""Every prefix of a mixture has its shares within one sample, and places are those of a walk."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from harness.data.mix_order import MOST_PERIOD, MixOrder, Phase, one_period, weights_of


def shares(*values: float) -> tuple[Fraction, ...]:
    return tuple(Fraction(str(value)) for value in values)


def drawn_shares(seed: int) -> tuple[Fraction, ...]:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 9))
    return shares(*(round(float(x), 3) or 0.001 for x in draw.random(count) ** 4))


def most_apart(order: MixOrder, weights: tuple[int, ...], samples: int) -> Fraction:
    """The largest distance from the shares, over all prefixes and sources, in samples."""
    sources, _ = order.places(np.arange(samples))
    drawn = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    ideal = np.arange(1, samples + 1)[:, None] * np.array(weights)  # times the period
    return Fraction(int(np.abs(drawn * sum(weights) - ideal).max()), sum(weights))


@pytest.mark.parametrize("seed", range(40))
def test_any_prefix_has_its_shares_within_one_sample(seed: int) -> None:
    wanted = drawn_shares(seed)
    weights = weights_of(wanted)
    if sum(weights) < MOST_PERIOD:
        assert [Fraction(w, sum(weights)) for w in weights] == [s / sum(wanted) for s in wanted]
    order = MixOrder([Phase(0, wanted)], [None] * len(wanted))
    assert most_apart(order, weights, min(2 * sum(weights) + 5, 20_000)) < 1


@pytest.mark.parametrize("seed", range(40))
def test_each_source_is_read_in_order_without_gaps(seed: int) -> None:
    """Also over limits and changes, and point by point as all at once."""
    draw = np.random.default_rng(seed)
    first, then = (drawn_shares(seed), drawn_shares(seed)[::-1])
    limits = [int(draw.integers(1, 400)) if draw.random() < 0.5 else None for _ in first]
    order = MixOrder([Phase(0, first), Phase(int(draw.integers(1, 900)), then)], limits)
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
        drawn = np.bincount(sources, minlength=len(limits))
        last = order.parts[-1].weights
        assert all(d == n for d, n, w in zip(drawn, limits, last, strict=True) if w)


def test_a_source_at_its_limit_leaves_its_share_to_the_others() -> None:
    order = MixOrder([Phase(0, shares(0.5, 0.3, 0.2))], [4, None, None])
    sources, _ = order.places(np.arange(1000))
    assert (sources == 0).sum() == 4
    after = sources[order.parts[1].first :]
    assert abs((after == 1).sum() - 0.6 * len(after)) < 1
    assert order.length is None


def test_shares_change_at_their_sample() -> None:
    order = MixOrder([Phase(0, shares(0.9, 0.1)), Phase(800, shares(0.5, 0.5))], [None, None])
    sources, _ = order.places(np.arange(1000))
    assert [(sources[:800] == 1).sum(), (sources[800:] == 1).sum()] == [80, 100]


def test_a_far_sample_needs_no_walk() -> None:
    order = MixOrder([Phase(0, shares(0.7, 0.3))], [None, None])
    far = np.array([10**15])
    assert [place.item() for place in order.places(far)] == [0, 7 * 10**14]


def test_shares_without_a_short_period_are_rounded() -> None:
    weights = weights_of((Fraction(1, 3), Fraction(1, 1_000_003), Fraction(2, 7)))
    assert sum(weights) == MOST_PERIOD
    assert weights[1] == 1
    assert weights[0] / weights[2] == pytest.approx(7 / 6, rel=1e-3)
    assert weights_of(shares(0.7, 0.2)) == (7, 2)


def test_one_source_is_all_there_is() -> None:
    assert one_period((1,)).tolist() == [0]
    assert one_period((1, 0, 2)).tolist() == [2, 0, 2]
