"""Documents as pieces of text or as token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TextIO

# Longer documents are read and tokenised in pieces of about this size.
PIECE_CHARS = 1 << 17
# Tokenizers attach a space to the word after it, so cutting before a space changes no id.
_CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
_SHOWN_CHARS = 60
# Characters to keep of the text before a cut: longer than a word, so that the word is tokenised as
# in the whole text.
_BEFORE_CHARS = 64
Spans = list[tuple[int, int]]
"""Spans (start, stop) of characters or tokens, in ascending order."""


@dataclass(frozen=True)
class Piece:
    """A part of a document; the piece with `is_last` set ends the document."""

    text: str
    learned: tuple[tuple[int, int], ...] | None = None
    """Spans of characters that are trained on; None: all."""
    is_last: bool = True
    before: str = ""
    """The end of the previous piece; "" for the first piece."""
    end_is_learned: bool = True
    """For the last piece: True if the token that ends the document is trained on."""

    @property
    def is_learned(self) -> bool:
        """True if the whole piece is trained on."""
        return self.learned is None

    def divided(self) -> Iterator[Piece]:
        """Yield the parts that are trained on and those that are not, in order."""
        if not self.learned or not self.text:
            yield self
            return
        cuts = sorted({0, len(self.text), *(at for run in self.learned for at in run)})
        for start, stop in pairwise(cuts):
            is_last = self.is_last and stop == len(self.text)
            yield Piece(self.text[start:stop], _within(self.learned, start, stop), is_last)


@dataclass(frozen=True)
class Ids:
    """A document that comes as token ids."""

    ids: list[int]
    learned: Spans
    """Spans of tokens that are trained on."""

    @property
    def is_learned(self) -> bool:
        """True if the whole document is trained on."""
        return self.learned == [(0, len(self.ids))]


def pieces_of(text: str, learned: Spans | None = None, *, closed: bool = True) -> Iterator[Piece]:
    """Yield a document in pieces. `learned`: spans of characters, None for all; `closed`: train on
    its end.
    """
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = _cut(text, start + PIECE_CHARS // 2, start + PIECE_CHARS)
        before = text[max(0, start - _BEFORE_CHARS) : start]
        yield Piece(text[start:cut], _within(learned, start, cut), False, before)
        start = cut
    before = text[max(0, start - _BEFORE_CHARS) : start]
    yield Piece(text[start:], _within(learned, start, len(text)), True, before, closed)


def _within(
    runs: Sequence[tuple[int, int]] | None, start: int, stop: int
) -> tuple[tuple[int, int], ...] | None:
    """Return the spans clipped to a piece and counted from its start."""
    if runs is None:
        return None
    cut = [(max(first, start) - start, min(last, stop) - start) for first, last in runs]
    return tuple((first, last) for first, last in cut if first < last)


def pieces_read(opened: TextIO) -> Iterator[Piece]:
    """Yield the text of an open file in pieces, as one document."""
    unread = before = ""
    while block := opened.read(PIECE_CHARS):
        unread += block
        if len(unread) > PIECE_CHARS:
            cut = _cut(unread, len(unread) // 2, len(unread))
            yield Piece(unread[:cut], is_last=False, before=before)
            unread, before = unread[cut:], unread[max(0, cut - _BEFORE_CHARS) : cut]
    yield Piece(unread, before=before)


def _cut(text: str, start: int, end: int) -> int:
    """Return an index in [start, end] where a cut changes no token id; `end` if there is none."""
    place = _CUT.search(text, start, end)
    return place.start() if place else end


def begins(text: str) -> str:
    """Return a description of a document's beginning, for a dry run."""
    return f"begins {shortened(text)!r}"


def shortened(text: str) -> str:
    """Return the first nonblank line of a text, cut to _SHOWN_CHARS."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS - 3]}..."
