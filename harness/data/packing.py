"""Documents concatenated with separators and cut into windows.

Window w holds the stream's tokens [w * seq_len, w * seq_len + seq_len + 1): the first seq_len are
inputs, the last seq_len are their targets. So every token except the stream's first is a target
once. Tokens after the last complete window are dropped. Windows that a run has kept from its data
do not share a token; their `stride`, from window to window, is seq_len + 1.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.data.pair import Document, Masks
from harness.data.split import Split
from harness.data.token_files import TokenFile
from harness.errors import ConfigError

IGNORED = -100  # the label that torch's cross entropy skips


@dataclass(frozen=True)
class Span:
    """Part of a document in a window: its tokens [first, last), which start at a column."""

    document: int
    first: int
    last: int
    column: int


@dataclass(frozen=True)
class Windows:
    """n windows as (n, seq_len) arrays."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    """Already shifted: labels[:, i] is the target at position i, or IGNORED."""
    positions: NDArray[np.int64]
    """Positions counted from 0 within each document, and within each side of a pair."""
    segments: NDArray[np.int64] | None = None
    """For preference pairs, as Batch.segments."""
    reference: NDArray[np.float64] | None = None
    """(pairs, 2), as Batch.reference."""


class Packed:
    """One split's token stream as windows of seq_len + 1 tokens."""

    holds_whole_documents = False
    padding = 0
    """Number of padding positions in all windows."""

    def __init__(
        self,
        tokens: TokenFile,
        split: Split,
        masks: Masks,
        *,
        seq_len: int,
        eos_id: int,
        vocab_size: int,
        add_separator: bool,
        stride: int | None = None,
    ) -> None:
        assert not (add_separator and split.has_masks), "documents with masks store their ends"
        self.split, self.seq_len = split, seq_len
        self._stride = stride or seq_len
        self.num_windows = max(0, split.num_tokens - seq_len - 1 + self._stride) // self._stride
        self.num_documents = split.num_documents
        self._tokens, self._masks = tokens, masks
        self._eos_id, self._vocab_size = eos_id, vocab_size
        self._add_separator = add_separator

    def of_length(self, seq_len: int) -> Packed:
        """Return the stream in windows of another length. Raises ConfigError if it has none."""
        other = copy.copy(self)
        other.seq_len = other._stride = seq_len
        other.num_windows = max(0, self.split.num_tokens - 1) // seq_len
        if not other.num_windows:
            raise ConfigError(
                f"eval.seq_len is {seq_len}, but the held-out text has {self.split.num_tokens} "
                "tokens: lower it, or add held-out text (data.held_out, data.eval_path)"
            )
        return other

    def read(self, windows: NDArray[np.int64]) -> Windows:
        """Return the (n,) windows. Raises ConfigError for an id outside the vocabulary."""
        begin = windows[:, None] * self._stride
        places = begin + np.arange(self.seq_len + 1)  # (n, seq_len + 1) in the stream
        rows = self._rows_of(windows)
        starts = self.split.starts[rows]
        ids = self._ids(rows, places - starts)
        labels = ids[:, 1:]
        if self.split.has_masks:
            sources = self.split.offsets[rows] + places - starts
            labels = np.where(self._masks.at(sources[:, 1:]), IGNORED, labels)
        positions = places - np.maximum(starts, begin)
        # Always copies: inputs and labels of one window would otherwise share memory.
        return Windows(
            *(np.array(array, order="C") for array in (ids[:, :-1], labels, positions[:, :-1]))
        )

    def learned_in(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of targets in the first `lengths` tokens of each document; its first
        token is never one.
        """
        firsts = self.split.offsets[rows]
        masked = self._masks.before(firsts + lengths) - self._masks.before(firsts + 1)
        learned: NDArray[np.int64] = lengths - 1 - masked
        return learned

    def targets(self, windows: NDArray[np.int64]) -> int:
        """Return the number of target tokens in the (n,) windows, without reading tokens."""
        begin = windows * self._stride + 1
        masked = self._masked_before(begin + self.seq_len) - self._masked_before(begin)
        return len(windows) * self.seq_len - int(masked.sum())

    def lengths(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length of each of the (n,) windows in tokens, without padding."""
        return np.full(len(windows), self.seq_len)

    def begin_documents(self, windows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each of the (n,) windows that starts with a document's first token."""
        begin = windows * self._stride
        begins: NDArray[np.bool_] = self.split.starts[self._rows_at(begin)] == begin
        return begins

    def spans(self, window: int) -> list[Span]:
        """Return the document spans in a window, seq_len + 1 tokens in total."""
        rows, firsts, lasts, columns = self._parts(window)
        parts = np.stack([self.split.numbers[rows], firsts, lasts, columns], axis=1)
        return [Span(*part) for part in parts.tolist()]

    def documents(self, window: int) -> list[Document]:
        """Return the document spans in a window, as tokens."""
        parts = zip(*(part.tolist() for part in self._parts(window)[:3]), strict=True)
        documents = []
        for row, first, last in parts:
            offsets = np.arange(first, last)
            rows = np.full_like(offsets, row)
            documents.append((self._ids(rows, offsets), ~self._is_masked(rows, offsets)))
        return documents

    def _parts(self, window: int) -> tuple[NDArray[np.int64], ...]:
        """Return split row, first token, last token and column of a window's document spans."""
        shown = self._rows_of(np.array([window]))[0]
        rows, columns, lengths = np.unique(shown, return_index=True, return_counts=True)
        firsts = window * self._stride + columns - self.split.starts[rows]
        return rows, firsts, firsts + lengths, columns

    def _rows_of(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the (n, seq_len + 1) split rows of the tokens in (n,) windows.

        One search per window, not per token: most tokens follow another of the same document.
        """
        begin = windows * self._stride
        end = begin + self.seq_len + 1
        first = self._rows_at(begin)
        counts = self._rows_at(end - 1) - first + 1
        window = np.repeat(np.arange(len(windows)), counts)
        rows = np.arange(len(window)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        starts = np.maximum(self.split.starts[rows], begin[window])
        stops = np.minimum(self.split.starts[rows + 1], end[window])
        return np.repeat(rows, stops - starts).reshape(len(windows), -1)

    def _is_masked(self, rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each token, at an offset in a document, that is not trained on."""
        return self._masks.at(self.split.offsets[rows] + offsets)

    def _masked_before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of masked tokens in the stream before each of the (n,) places."""
        rows = self._rows_at(places)
        offsets = self.split.offsets[rows]
        inside = self._masks.before(offsets + places - self.split.starts[rows])
        return self.split.masked[rows] + inside - self._masks.before(offsets)

    def _rows_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the split row at each place in the stream; the last row at the very end."""
        rows: NDArray[np.int64] = np.searchsorted(self.split.starts, places, side="right") - 1
        return np.minimum(rows, self.split.num_documents - 1)

    def _ids(self, rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids at offsets in documents, adding separators missing from the file."""
        sources = self.split.offsets[rows] + offsets
        if self._add_separator:
            is_separator = offsets == self.split.starts[rows + 1] - self.split.starts[rows] - 1
            stored = self._tokens.read(np.minimum(sources, len(self._tokens) - 1))
            ids = np.where(is_separator, self._eos_id, stored)
        else:
            ids = self._tokens.read(sources)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            at = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0]
            raise ConfigError(
                f"data.path: document {self.split.numbers[rows.flat[at]]} has token id "
                f"{ids.flat[at]} at offset {offsets.flat[at]}, outside the model's vocabulary of "
                f"{self._vocab_size} (model.overrides.vocab_size)"
            )
        return ids


def require_contiguous(packed: Packed, rows: int) -> None:
    """Raise ConfigError if windows cannot be read as `rows` contiguous streams: there are too few,
    or they hold whole documents.
    """
    if packed.holds_whole_documents:
        raise ConfigError(
            "train.carry_state is true, but windows hold whole documents (data.packing, the "
            "default if prompts are masked): set data.packing=stream, or train.carry_state=false"
        )
    if rows > packed.num_windows:
        raise ConfigError(
            f"train.carry_state is true, but {packed.num_windows} windows are too few for {rows} "
            "streams of text (train.global_batch): lower train.global_batch or data.seq_len, or "
            "add text"
        )
