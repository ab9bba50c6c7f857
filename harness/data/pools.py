"""The order of samples by length: pools of them sorted, cut into groups, and the groups dealt out.

It is a pure function of the samples' own order and of their lengths: neither the ranks nor the size
of a step enter. Groups of one pool follow each other in steps of the golden ratio around it (a
Kronecker sequence): any few groups in a row are spread evenly over its lengths. So every step has
short and long documents, in shares as even as its few groups allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from harness.data.order import round_keys

_GOLDEN = (math.sqrt(5) - 1) / 2
_KEPT_POOLS = 8
"""Pools of which a step may need several."""


class Pools:
    """Sorted pools of the samples of a stream, computed where they are read.

    No pool crosses the end of an epoch, so that an epoch has every sample once, nor a sample from
    which on a mixture has other shares.
    """

    def __init__(
        self,
        lengths: Callable[[NDArray[np.int64]], NDArray[np.int64]],
        pool: int,
        group: int,
        epoch: int,
        end: int | None,
        key: str,
        changes: Sequence[int] = (),
    ) -> None:
        """`lengths`: tokens of some samples; `epoch`: samples of one; `end`: of the stream, None
        without end; `changes`: samples at which a pool begins, rising.
        """
        assert pool % group == 0, "a pool has whole groups"
        self._lengths, self._pool, self._group = lengths, pool, group
        self._epoch, self._end, self._key = epoch, end, key
        self._changes = np.array([0, *changes, np.iinfo(np.int64).max])
        self._sorted = lru_cache(_KEPT_POOLS)(self._sort)

    def places(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample of the stream that is read at each place of this order."""
        change = self._changes[np.searchsorted(self._changes, samples, side="right") - 1]
        within = np.minimum(samples % self._epoch % self._pool, samples - change)
        firsts = samples - within
        chosen = np.empty_like(samples)
        for first in sorted(set(firsts.tolist())):
            here = firsts == first
            chosen[here] = self._sorted(first)[within[here]]
        return chosen

    def _sort(self, first: int) -> NDArray[np.int64]:
        """Return the samples of the pool that begins with `first` in their order; those beyond
        whole groups come last.
        """
        of_epoch = first % self._epoch
        change = int(self._changes[np.searchsorted(self._changes, first, side="right")])
        size = min(self._pool - of_epoch % self._pool, self._epoch - of_epoch, change - first)
        if self._end is not None:
            size = min(size, self._end - first)
        own = first + np.arange(size)
        own = own[np.argsort(-self._lengths(own), kind="stable")]
        groups = size // self._group
        stride = next(n for n in _near(round(groups * _GOLDEN)) if math.gcd(n, groups) == 1)
        begin = int(round_keys("pool", self._key, first)[0] % np.uint64(max(1, groups)))
        order = (begin + stride * np.arange(groups)) % max(1, groups)
        whole = own[: groups * self._group].reshape(groups, self._group)[order]
        return np.concatenate([whole.ravel(), own[groups * self._group :]])


def _near(number: int) -> list[int]:
    """Return the numbers from 1 on, nearest first."""
    return sorted(range(1, 2 * number + 3), key=lambda other: abs(other - number))
