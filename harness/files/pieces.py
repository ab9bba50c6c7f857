"""Documents as pieces of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO

# Longer documents are read and tokenised in pieces of about this size.
PIECE_CHARS = 1 << 17
# Tokenizers join a space to the word after it, not to the word before: a cut there changes no id.
_CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Piece:
    """A part of a document; a document is the run of pieces that ends with a `last` one."""

    text: str
    is_learned: bool = True
    """False: read, but not trained on."""
    is_last: bool = True


def pieces_of(text: str, *, is_learned: bool = True, is_last: bool = True) -> Iterator[Piece]:
    """Yield a string in pieces; `is_last`: it ends its document."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = _cut(text, start + PIECE_CHARS // 2, start + PIECE_CHARS)
        yield Piece(text[start:cut], is_learned, is_last=False)
        start = cut
    yield Piece(text[start:], is_learned, is_last)


def unless_blank(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Return the pieces of a document. Raises ValueError if they are nothing but white space."""
    document = [*pieces]
    if not any(piece.text.strip() for piece in document):
        raise ValueError("is blank: nothing to learn")
    return iter(document)


def pieces_read(opened: TextIO) -> Iterator[Piece]:
    """Yield the text of an open file in pieces, as one document."""
    unread = ""
    while block := opened.read(PIECE_CHARS):
        unread += block
        if len(unread) > PIECE_CHARS:
            cut = _cut(unread, len(unread) // 2, len(unread))
            yield Piece(unread[:cut], is_last=False)
            unread = unread[cut:]
    yield Piece(unread)


def _cut(text: str, start: int, end: int) -> int:
    """Return a place in [start, end] where a cut changes no token id; `end` if there is none."""
    place = _CUT.search(text, start, end)
    return place.start() if place else end


def begins(text: str) -> str:
    """Return how a document begins, as a dry run prints it."""
    return f"begins {shortened(text)!r}"


def shortened(text: str) -> str:
    """Return the first nonblank line of a text, cut to the length of a row."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS - 3]}..."
