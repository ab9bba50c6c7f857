"""The train and held-out documents, and their positions in each side's token stream."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.config.data_section import ANY_LENGTH, TokenBounds
from harness.data.cache import cached_array
from harness.data.order import mix
from harness.data.pair import BLOCK, IndexedTokens, Masks
from harness.data.token_files import ArrayFile
from harness.errors import ConfigError

SIDES = ("train", "held_out")
_SAMPLED_DOCUMENTS = 10_000


@dataclass(frozen=True)
class Split:
    """The n documents of one side, concatenated into a stream; memory maps of (n + 1,).

    If the file stores no separators, a document has one more token in the stream than in the file.
    """

    starts: NDArray[np.int64]
    """Start of each document in the stream, then the stream's length."""
    offsets: NDArray[np.int64]
    """Start of each document in the .bin."""
    numbers: NDArray[np.int64]
    """Index of each document in the corpus."""
    masked: NDArray[np.int64]
    """Number of masked tokens in all earlier documents."""
    begin_tokens: int = 0
    """Maximum number of masked tokens at the start of a document that the tokenizer prepended."""

    @property
    def num_documents(self) -> int:
        """Number of documents, including empty ones."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Length of the stream in tokens."""
        return int(self.starts[-1])

    @property
    def has_masks(self) -> bool:
        """True if some tokens are masked, that is, read but not trained on."""
        return bool(self.masked[-1] > 0)

    @property
    def is_masked(self) -> bool:
        """True if more is masked than what the tokenizer adds, such as prompts or user turns."""
        return bool(self.masked[-1] > self.begin_tokens * self.num_documents)


def load_split(folder: Path, side: str, begin_tokens: int = 0) -> Split:
    """Open one side that write_splits wrote: "train" or "held_out"."""
    rows = cached_array(folder / f"{side}.npy", np.dtype("i8"), rows=4)
    starts, offsets, numbers, masked = rows
    return Split(starts, offsets, numbers, masked, begin_tokens)


def stores_separator(tokens: IndexedTokens, eos_id: int) -> bool:
    """Return True if documents end with the separator. Raises ConfigError if only some do."""
    filled = sum(int(np.count_nonzero(np.diff(block))) for block in tokens.starts())
    step, skipped, lasts = 1 + filled // _SAMPLED_DOCUMENTS, 0, [np.empty(0, np.int64)]
    for block in tokens.starts():
        ends = block[1:][np.diff(block) > 0]
        lasts.append(ends[skipped::step] - 1)
        skipped = (skipped - len(ends)) % step
    sampled = np.concatenate(lasts)
    ended = int((tokens.ids.read(sampled) == eos_id).sum())
    if ended not in (0, len(sampled)):
        raise ConfigError(
            f"data.path: {ended} of {len(sampled)} sampled documents in {tokens.name} end "
            f"with the tokenizer's eos (id {eos_id}), the others do not: is data.tokenizer the "
            "one that wrote them?"
        )
    return ended > 0


def write_splits(
    folder: Path,
    tokens: IndexedTokens,
    masks: Masks,
    held_out: float | None,
    *,
    add_separator: bool,
    bounds: TokenBounds = ANY_LENGTH,
) -> tuple[int, int]:
    """Write both sides, one block of documents at a time; return the number of documents that are
    too short and of those that are too long, which are on neither side.

    A hash of its number alone decides whether a document is held out, independent of seed,
    tokenizer and `bounds`: sources with the same documents hold out the same ones (others that
    overlap are rejected). Each side gets at least one; the only document of a corpus is cut and its
    end held out. With `held_out` None nothing is held out.
    """
    moved = {} if held_out is None else _moved(tokens.documents, held_out)
    blocks = partial(_blocks, tokens, held_out, moved, add_separator, bounds)
    sizes, left_out = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    for block in blocks():
        sizes += [np.count_nonzero(side) for side in block.sides]
        left_out += block.left_out
    paths = [folder / f"{name}.npy" for name in SIDES]
    with _SideFile(paths[0], int(sizes[0])) as train, _SideFile(paths[1], int(sizes[1])) as other:
        for block in blocks():
            masked = np.diff(masks.before(block.starts))
            columns = (block.lengths, block.starts[:-1], block.numbers, masked)
            for side, chosen in zip((train, other), block.sides, strict=True):
                side.add(*(column[chosen] for column in columns))
    shorter, longer = left_out.tolist()
    return shorter, longer


@dataclass(frozen=True)
class _Block:
    """Consecutive documents and the side that each is on."""

    starts: NDArray[np.int64]
    """(n + 1,) document bounds in the .bin."""
    lengths: NDArray[np.int64]
    """Lengths in tokens, with separators."""
    numbers: NDArray[np.int64]
    sides: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    left_out: tuple[int, int]


def _blocks(
    tokens: IndexedTokens,
    share: float | None,
    moved: Mapping[int, bool],
    separator: bool,
    bounds: TokenBounds,
) -> Iterator[_Block]:
    """Yield the documents of a corpus with their sides. `moved` holds the side of the documents
    whose hash is overridden: True if held out, by number.
    """
    first = 0
    for starts in tokens.starts():
        numbers = first + np.arange(len(starts) - 1)
        first += len(numbers)
        is_held_out = np.zeros(len(numbers), dtype=bool)
        if share is not None:
            is_held_out = _hashes(numbers) < np.uint64(int(share * 2**64))
        for number, is_moved in moved.items():
            is_held_out[numbers == number] = is_moved
        lengths = np.diff(starts) + separator
        shorter = lengths < (bounds.least or 0)
        longer = lengths > (np.inf if bounds.most is None else bounds.most)
        inside = ~(shorter | longer)
        if tokens.documents == 1 and share is not None:
            cut = starts[1] - max(1, round(int(starts[1]) * share))
            starts, numbers = np.insert(starts, 1, cut), numbers[[0, 0]]
            is_held_out, inside = np.arange(2) > 0, inside[[0, 0]]
            lengths = np.diff(starts) + separator
        sides = (~is_held_out & inside, is_held_out & inside)
        yield _Block(starts, lengths, numbers, sides, (int(shorter.sum()), int(longer.sum())))


def _moved(documents: int, share: float) -> dict[int, bool]:
    """Return the document to move to the other side so that neither side is empty, if any."""
    limit, lowest, highest = int(share * 2**64), (1 << 64, 0), (-1, 0)
    for first in range(0, documents, BLOCK):
        hashes = _hashes(np.arange(first, min(first + BLOCK, documents)))
        lowest = min(lowest, (int(hashes.min()), first + int(hashes.argmin())))
        highest = max(highest, (int(hashes.max()), -first - int(hashes.argmax())))
        if lowest[0] < limit <= highest[0]:
            return {}
    return {lowest[1]: True} if lowest[0] >= limit else {-highest[1]: False}


def _hashes(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    return mix(mix(numbers.astype(np.uint64) + np.uint64(1)))


class _SideFile(ArrayFile):
    """The rows of a Split, written one block of documents at a time."""

    def __init__(self, path: Path, documents: int) -> None:
        super().__init__(path, "i8", 4, documents + 1)
        self._sums = {0: 0, 3: 0}
        for row in self._sums:  # the sums before the first document
            self.append(np.zeros(1), row)

    def add(self, *columns: NDArray[np.int64]) -> None:
        """Write lengths, offsets, numbers and masked-token counts of the next documents."""
        for row, column in enumerate(columns):
            if row in self._sums:
                column = self._sums[row] + np.cumsum(column)
                self._sums[row] = int(column[-1]) if len(column) else self._sums[row]
            self.append(column, row)
