"""The train and held-out documents, and their places in each side's stream of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.data.cache import cached_array
from harness.data.indexed import IndexedTokens
from harness.data.masks import Masks
from harness.data.order import mix
from harness.errors import ConfigError

SIDES = ("train", "held_out")
_SAMPLED_DOCUMENTS = 10_000


@dataclass(frozen=True)
class Split:
    """One side's n documents, concatenated into a stream; (n + 1,) memory maps.

    If the file stores no separators, a document has one token more in the stream than in the file.
    """

    starts: NDArray[np.int64]
    """Start of each document in the stream; the last is the stream's length."""
    offsets: NDArray[np.int64]
    """Start of each document in the .bin."""
    numbers: NDArray[np.int64]
    """Number of each document in the corpus."""
    masked: NDArray[np.int64]
    """Masked tokens in all documents before."""

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return int(self.starts[-1])

    @property
    def is_masked(self) -> bool:
        """True if some tokens are masked: read, but not trained on."""
        return bool(self.masked[-1] > 0)


def load_split(folder: Path, side: str) -> Split:
    """Open one side of write_splits: "train" or "held_out"."""
    return Split(*cached_array(folder / f"{side}.npy", np.dtype("i8"), rows=4))


def stores_separator(tokens: IndexedTokens, starts: NDArray[np.int64], eos_id: int) -> bool:
    """Return True if the file's documents end with the separator. Raises ConfigError if some do."""
    filled = np.flatnonzero(np.diff(starts))
    sampled = filled[:: 1 + len(filled) // _SAMPLED_DOCUMENTS]
    ended = int((tokens.ids.read(starts[sampled + 1] - 1) == eos_id).sum())
    if ended not in (0, len(sampled)):
        raise ConfigError(
            f"data.path: {ended} of {len(sampled)} documents looked at in {tokens.bin_path} end "
            f"with the tokenizer's eos (id {eos_id}), the others do not; is data.tokenizer the "
            "one that wrote them?"
        )
    return ended > 0


def write_splits(
    folder: Path,
    starts: NDArray[np.int64],
    masks: Masks,
    held_out: float | None,
    *,
    add_separator: bool,
) -> None:
    """Write both sides; `starts` are the documents' (n + 1,) bounds in the .bin.

    A document is held out by a hash of its number alone, so neither the seed nor the tokenizer
    changes the choice; each side gets at least one. The only document of a corpus is cut: its
    last part is held out. None holds out nothing.
    """
    documents = len(starts) - 1
    numbers, is_held_out = np.arange(documents), np.zeros(documents, dtype=bool)
    if held_out is not None:
        is_held_out = _held_out(documents, held_out)
    if documents == 1 and held_out is not None:
        first_length = starts[1] - max(1, round(int(starts[1]) * held_out))
        starts, numbers, is_held_out = (
            np.insert(starts, 1, first_length),
            numbers[[0, 0]],
            np.arange(2) > 0,
        )
    lengths, masked = np.diff(starts) + add_separator, np.diff(masks.before(starts))
    for side, chosen in zip(SIDES, (~is_held_out, is_held_out), strict=True):
        shape = (4, int(chosen.sum()) + 1)
        columns = np.lib.format.open_memmap(
            folder / f"{side}.npy", mode="w+", dtype=np.int64, shape=shape
        )
        columns[0, 1:] = np.cumsum(lengths[chosen])
        columns[1, :-1] = starts[:-1][chosen]
        columns[2, :-1] = numbers[chosen]
        columns[3, 1:] = np.cumsum(masked[chosen])
        columns.flush()


def _held_out(documents: int, fraction: float) -> NDArray[np.bool_]:
    """Return the (documents,) mask of held-out ones: at least one per side, if there are two."""
    hashes = mix(mix(np.arange(1, documents + 1, dtype=np.uint64)))
    is_held_out = hashes < np.uint64(int(fraction * 2**64))
    if not is_held_out.any():
        is_held_out[hashes.argmin()] = True
    elif is_held_out.all():
        is_held_out[hashes.argmax()] = False
    return is_held_out
