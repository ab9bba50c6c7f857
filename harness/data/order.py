"""The sample order: one permutation per epoch, computed point by point; and uniform samples of it.

The order is a pure function of (seed, data fingerprint, epoch, global sample index). Nothing is
stored, so a corpus of 10**12 tokens needs no index array. It uses no library's random generator, so
a newer numpy cannot reorder a resumed run.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
# Multipliers of the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014).
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BLOCK = 1024  # random numbers drawn at once


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's finaliser, a bijection of 64-bit numbers that looks random; any shape."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def round_keys(*parts: object) -> NDArray[np.uint64]:
    """Return the (ROUNDS,) keys of one permutation, identified by the `str` of all parts."""
    text = ":".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(indices: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the images of `indices` under a permutation of range(size).

    A Feistel network permutes the smallest even number of bits that can hold `size`. An image
    outside range(size) is permuted again until it falls inside ("cycle walking", Black and Rogaway,
    CT-RSA 2002), which takes fewer than four passes on average.
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half_bits)) - 1)

    def encipher(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> half_bits, values & low
        for key in keys:
            left, right = right, left ^ (mix(right + key) & low)
        return (left << half_bits) | right

    images = encipher(indices.astype(np.uint64))
    outside = np.flatnonzero(images >= size)
    while outside.size:
        images[outside] = encipher(images[outside])
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)


def window_of(
    samples: NDArray[np.int64], windows: int, seed: int, fingerprint: str
) -> NDArray[np.int64]:
    """Return the window of each global sample index. The epoch is index // windows."""
    epochs, within = np.divmod(samples, windows)
    chosen = np.empty_like(within)
    for epoch in set(epochs.tolist()):  # np.unique would import numpy.ma
        here = epochs == epoch
        keys = round_keys("order", seed, fingerprint, epoch)
        chosen[here] = permute(within[here], windows, keys)
    return chosen


def reservoir(size: int, seen: int, key: str) -> NDArray[np.int64]:
    """Return the `size` samples kept from the first `seen`, or all if fewer; ascending.

    Algorithm L (Li, "Reservoir-sampling algorithms of time complexity O(n(1 + log(N/n)))", ACM TOMS
    20, 1994) jumps from one replacement to the next. Its random numbers depend only on the key and
    their index: a resumed run, in any layout, keeps the same sample as an uninterrupted one.
    """
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
