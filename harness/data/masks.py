"""Runs of tokens of a .bin that are read but not learned: prompts, the user's turns of a chat."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.data.cache import cached_array, damaged


@dataclass(frozen=True)
class Masks:
    """The masked runs of a .bin in ascending order; (runs + 1,) each, memory maps.

    The first run is empty, at place 0, so that every place has a run at or before it. Without a
    masked token it is the only one.
    """

    starts: NDArray[np.int64]
    """Place of each run's first token in the .bin."""
    stops: NDArray[np.int64]
    """Place behind each run's last token."""
    totals: NDArray[np.int64]
    """Masked tokens in this run and all before."""

    def at(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each masked place in the .bin, of any shape; fast if the rows ascend."""
        return places < self.stops[self._run_of(places)]

    def before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of masked tokens before each place in the .bin, of any shape."""
        runs = self._run_of(places)
        left: NDArray[np.int64] = np.maximum(self.stops[runs] - places, 0)
        return self.totals[runs] - left

    def _run_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the last run that begins at or before each place."""
        runs: NDArray[np.int64] = np.searchsorted(self.starts, places, side="right") - 1
        return runs


NO_MASKS = Masks(*np.zeros((3, 1), dtype=np.int64))


class MaskWriter:
    """Collects the masked runs of documents, which are added in order; 16 bytes per run."""

    def __init__(self) -> None:
        self._starts, self._stops = array("q", [0]), array("q", [0])
        self._tokens = 0

    def add(self, count: int, *, masked: bool) -> None:
        """Add the next tokens of the .bin."""
        count = max(0, count)
        if masked and count:
            if self._stops[-1] == self._tokens and len(self._stops) > 1:
                self._stops[-1] += count
            else:
                self._starts.append(self._tokens)
                self._stops.append(self._tokens + count)
        self._tokens += count

    def add_learned(self, count: int, learned: list[tuple[int, int]]) -> None:
        """Add the next tokens of the .bin, all masked but for ascending runs (start, stop)."""
        at = 0
        for start, stop in learned:
            self.add(start - at, masked=True)
            at = max(start, at)  # a token may stand for the end of a run and the start of another
            self.add(stop - at, masked=False)
            at = max(stop, at)
        self.add(count - at, masked=True)

    def save(self, path: Path) -> None:
        """Write the runs for load_masks."""
        starts, stops = (np.asarray(column) for column in (self._starts, self._stops))
        np.save(path, np.stack([starts, stops, np.cumsum(stops - starts)]))


def join_masks(parts: Iterable[tuple[Masks, int]], path: Path) -> None:
    """Write the runs of consecutive parts of a .bin, each with its number of tokens, as one file:
    that of a single MaskWriter.
    """
    columns, before = [np.zeros((2, 0), dtype=np.int64)], 0
    for masks, tokens in parts:
        columns.append(np.stack([masks.starts[1:], masks.stops[1:]]) + before)
        before += tokens
    starts, stops = np.concatenate(columns, axis=1)
    is_apart = stops[:-1] != starts[1:]  # a run may go on in the next part
    if starts.size:
        starts, stops = starts[np.r_[True, is_apart]], stops[np.r_[is_apart, True]]
    starts, stops = np.r_[0, starts], np.r_[0, stops]
    np.save(path, np.stack([starts, stops, np.cumsum(stops - starts)]))


def load_masks(path: Path) -> Masks:
    """Open the file of a MaskWriter in a finished folder. Raises ConfigError if it is damaged."""
    columns = cached_array(path, np.dtype("i8"), rows=3)
    if not columns.size:
        raise damaged(path, f"it holds {columns.shape} {columns.dtype}")
    return Masks(*columns)
