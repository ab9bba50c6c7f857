"""Windows that hold whole documents: best-fit packing, the rest padded.

A document takes as many positions as it has tokens; its last one has no target. Padding comes last
in a window. Its positions count from 1 as no document's do: attention keeps to itself there, and
`padding_of` (models/loss.py) recognises it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness.data.array_file import ArrayFile
from harness.data.best_fit import BestFit
from harness.data.cache import cached_array, damaged, fetch, release
from harness.data.packing import IGNORED, Packed, Windows
from harness.data.pair import BLOCK
from harness.errors import ConfigError, Unusable
from harness.files.regular_file import read_json

# Increase this if the same documents would give other windows.
WHOLE_FORMAT = 1
_MOST_FACTS_BYTES = 2**20
TooLong = Literal["cut", "drop", "refuse"]


@dataclass(frozen=True)
class WholeFacts:
    """Counts of a packing."""

    too_long: int
    """Documents with more tokens than a window."""
    dropped: bool
    """True if these are in no window; False: cut at their end."""
    longest: int
    """Tokens of the longest document."""
    without_target: int
    """Documents without a token to learn, which are in no window."""
    padding: int
    """Positions of all windows that hold no token."""


def write_whole(
    folder: Path, side: str, packed: Packed, too_long: TooLong, *, alone: bool = False
) -> None:
    """Write the windows of one side of a split; `alone`: each holds one document."""
    cut, chosen = packed.seq_len, []
    longer = longest = first_longer = without_target = tokens = 0
    counts = np.zeros(cut + 1, dtype=np.int64)
    for rows, lengths in _documents_of(packed):
        is_longer = lengths > cut
        if not longer and is_longer.any():
            first_longer = int(packed.split.numbers[rows[is_longer.argmax()]])
        longer, longest = longer + int(is_longer.sum()), max(longest, int(lengths.max()))
        is_kept = ~is_longer if too_long == "drop" else np.ones(len(rows), dtype=bool)
        is_learned = packed.learned_in(rows, np.minimum(lengths, cut)) > 0
        without_target += int((~is_learned & is_kept).sum())
        chosen.append(is_learned & is_kept)
        sizes = np.minimum(lengths[chosen[-1]], cut)
        counts += np.bincount(sizes, minlength=cut + 1)
        tokens += int(sizes.sum())
    if too_long == "refuse" and longer:
        raise ConfigError(
            f"data.too_long is refuse: {longer:,} of {packed.split.num_documents:,} documents are "
            f"longer than data.seq_len = {cut} tokens, document {first_longer} the first of them, "
            f"the longest has {longest:,}: raise data.seq_len, or set data.too_long to cut or drop"
        )
    write = _write_alone if alone else _write_bins
    windows = write(folder / side, packed, chosen, counts)
    padding = windows * cut - tokens
    facts = WholeFacts(longer, too_long == "drop", longest, without_target, padding)
    (folder / f"{side}.json").write_text(json.dumps(asdict(facts)))


def _documents_of(packed: Packed) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield rows and lengths of a side's documents, a block at a time."""
    for first in range(0, packed.split.num_documents, BLOCK):
        starts = np.array(packed.split.starts[first : first + BLOCK + 1])
        yield first + np.arange(len(starts) - 1), np.diff(starts)
        release(packed.split.starts)


def _write_alone(
    path: Path, packed: Packed, chosen: list[NDArray[np.bool_]], counts: NDArray[np.int64]
) -> int:
    """Write a window for each chosen document; return their number."""
    windows = int(counts.sum())
    names = (("rows", "i8", 0), ("firsts", "i8", 1), ("lengths", "i4", 0))
    # Lengths beside each other: sorting a pool looks at one place for each document.
    with ExitStack() as stack:
        rows, firsts, lengths = (
            stack.enter_context(ArrayFile(Path(f"{path}.{name}.npy"), dtype, windows + more))
            for name, dtype, more in names
        )
        for (row, length), of_block in zip(_documents_of(packed), chosen, strict=True):
            rows.append(row[of_block])
            lengths.append(np.minimum(length[of_block], packed.seq_len))
        for first in range(0, windows + 1, BLOCK):
            firsts.append(np.arange(first, min(first + BLOCK, windows + 1)))
    return windows


def _write_bins(
    path: Path, packed: Packed, chosen: list[NDArray[np.bool_]], counts: NDArray[np.int64]
) -> int:
    """Write windows of best-fit packed documents; return their number."""
    packing = BestFit(counts, packed.seq_len)
    for (row, length), of_block in zip(_documents_of(packed), chosen, strict=True):
        packing.add(np.minimum(length[of_block], packed.seq_len), row[of_block])
    with (
        ArrayFile(Path(f"{path}.rows.npy"), "i8", packing.items) as rows,
        ArrayFile(Path(f"{path}.firsts.npy"), "i8", packing.num_bins + 1) as firsts,
    ):
        end = 0
        firsts.append(np.zeros(1))
        for items, per_bin in packing.bins():
            rows.append(items)
            ends = end + np.cumsum(per_bin)
            firsts.append(ends)
            end = int(ends[-1])
    return packing.num_bins


class WholeWindows(Packed):
    """One split's documents in the windows that write_whole has made."""

    def __init__(self, folder: Path, side: str, *, alone: bool = False, **documents: Any) -> None:
        """`documents`: the arguments of Packed."""
        super().__init__(**documents)
        self._lengths: NDArray[np.int32] | None = None
        if alone:
            self._lengths = cached_array(folder / f"{side}.lengths.npy", np.dtype("i4"))
        self.facts = _read_facts(folder / f"{side}.json")
        self._rows = cached_array(folder / f"{side}.rows.npy", np.dtype("i8"))
        self._firsts = cached_array(folder / f"{side}.firsts.npy", np.dtype("i8"))
        self.num_windows = len(self._firsts) - 1

    @property
    def padding_share(self) -> float:
        """Share of the positions of all windows that hold no token."""
        return self.facts.padding / max(1, self.num_windows * self.seq_len)

    def counts(self) -> str:
        """Return documents cut, dropped and left out, and the share of padding, as text."""
        facts, parts = self.facts, [f"{self.padding_share:.2%} padding"]
        if facts.too_long:
            done = "dropped" if facts.dropped else "cut"
            parts.append(f"{facts.too_long:,} longer than {self.seq_len:,} tokens {done}")
        if facts.without_target:
            parts.append(f"{facts.without_target:,} without a target left out")
        return ", ".join(parts)

    def of_length(self, seq_len: int) -> Packed:
        """Raise ConfigError: the windows were made for one length."""
        raise ConfigError(
            f"eval.seq_len is {seq_len}, but samples hold whole documents: set data.packing=stream"
        )

    def read(self, windows: NDArray[np.int64]) -> Windows:
        """Return the (n,) windows. Raises ConfigError for an id outside the vocabulary."""
        rows, window, lengths, columns = self._documents_in(windows)
        ends = np.cumsum(lengths)
        offsets = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        places = np.repeat(window * self.seq_len + columns, lengths) + offsets
        row_of = np.repeat(rows, lengths)
        ids = self._ids(row_of, offsets)
        labels = np.where(self._is_masked(row_of, offsets), IGNORED, ids)
        labels = np.append(labels[1:], IGNORED)
        labels[ends - 1] = IGNORED  # what follows is another document
        shape = (len(windows), self.seq_len)
        used = np.bincount(window, lengths, len(windows)).astype(np.int64)
        read = Windows(
            np.full(shape, self._eos_id),
            np.full(shape, IGNORED),
            np.arange(1, self.seq_len + 1) - used[:, None],
        )
        for array, values in zip(
            (read.ids, read.labels, read.positions), (ids, labels, offsets), strict=True
        ):
            array.reshape(-1)[places] = values
        return read

    def targets(self, windows: NDArray[np.int64]) -> int:
        """Return the target tokens of the (n,) windows, counted without reading tokens."""
        rows, _, lengths, _ = self._documents_in(windows)
        return int(self.learned_in(rows, lengths).sum())

    def lengths(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of each of the (n,) windows, without padding."""
        if self._lengths is not None:
            fetch(self._lengths, windows)
            return self._lengths[windows].astype(np.int64)
        _, window, lengths, _ = self._documents_in(windows)
        return np.bincount(window, lengths, len(windows)).astype(np.int64)

    def _parts(self, window: int) -> tuple[NDArray[np.int64], ...]:
        """Return split row, first and last token and column of each document."""
        rows, _, lengths, columns = self._documents_in(np.array([window]))
        return rows, np.zeros_like(rows), lengths, columns

    def _documents_in(
        self, windows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return split row, place among `windows`, length and column of their documents."""
        firsts = self._firsts[windows]
        counts = self._firsts[windows + 1] - firsts
        befores = np.cumsum(counts) - counts
        window = np.repeat(np.arange(len(windows)), counts)
        rows = self._rows[np.arange(len(window)) + np.repeat(firsts - befores, counts)]
        lengths = np.minimum(self.split.starts[rows + 1] - self.split.starts[rows], self.seq_len)
        begins = np.cumsum(lengths) - lengths
        return rows, window, lengths, begins - begins[befores][window]


def _read_facts(path: Path) -> WholeFacts:
    try:
        facts: Any = read_json(path, _MOST_FACTS_BYTES, links=True)
        return WholeFacts(**facts)
    except (OSError, Unusable, TypeError) as error:
        raise damaged(path, error) from error
