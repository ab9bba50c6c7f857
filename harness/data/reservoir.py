"""A uniform sample of what a run has read so far, and its documents on disk.

Algorithm L (Li, "Reservoir-sampling algorithms of time complexity O(n(1 + log(N/n)))", ACM TOMS 20,
1994) jumps from one replacement to the next. Its random numbers depend only on the seed and their
index, so the sample after n samples is a function of n alone: a resumed run, in any layout, keeps
the same sample as an uninterrupted one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.data.order import mix, round_keys
from harness.data.packing import Document
from harness.data.pair import MaskWriter, write_indexed
from harness.files.kept_sample import masks_of

_BLOCK = 1024  # random numbers drawn at once


def reservoir(size: int, seen: int, key: str) -> NDArray[np.int64]:
    """Return the `size` samples kept from the first `seen`, or all if fewer; ascending."""
    if seen <= size:
        return np.arange(seen)
    kept, draws = list(range(size)), _uniform(key)
    weight, at = next(draws) ** (1 / size), size - 1
    while True:
        below_one = min(weight, 1 - 2**-53)  # a power close to 1 rounds to 1
        at += math.floor(math.log(next(draws)) / math.log1p(-below_one)) + 1
        if at >= seen:
            return np.sort(np.array(kept))
        kept[int(next(draws) * size)] = at
        weight *= next(draws) ** (1 / size)


def _uniform(key: str) -> Iterator[float]:
    """Yield random numbers strictly between 0 and 1."""
    first = round_keys("reservoir", key)[:1]
    for block in itertools.count():
        places = np.arange(block * _BLOCK, (block + 1) * _BLOCK).astype(np.uint64)
        drawn: NDArray[np.uint64] = mix(first + places)
        yield from (((drawn >> np.uint64(11)) + 0.5) / 2**53).tolist()


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
