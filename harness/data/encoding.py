"""Encodes parts of documents as token ids, in groups."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from harness.data.chat_tokens import ChatEncoder, Encoded, Rendered, tokens_of
from harness.data.tokenizer import (
    PIECES_AT_ONCE,
    encode,
    encode_with_offsets,
    joins_pieces,
    vocab_size,
    with_full_spans,
)
from harness.errors import ConfigError
from harness.files.chat import Chat
from harness.files.corpus import Corpus, Part
from harness.files.data_format import BadLines
from harness.files.pieces import Ids, Piece

Places = NDArray[np.int64]
"""(tokens, 2): start and stop of each token in the text."""
_NO_PLACES: Places = np.zeros((0, 2), dtype=np.int64)

# Maximum characters to tokenise at once: a tokenizer needs about a hundred bytes per character.
_CHARS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class HowEncoded:
    """Run config values that, besides the tokenizer, determine the ids of documents."""

    learn: str = "assistant"
    """data.learn."""
    begin: Sequence[int] = ()
    """Ids prepended to every text document, as when serving; not trained on."""
    day: str | None = None
    """Date that a chat template writes; None: today."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of a chat template's variables."""


class Encoder:
    """A tokenizer that appends the separator to documents and computes the loss mask."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, how: HowEncoded) -> None:
        """Raises ConfigError if a corpus of conversations has no chat template."""
        self._corpus, self._tokenizer, self._how = corpus, tokenizer, how
        self._chats = None
        if corpus.holds_chats:
            self._chats = ChatEncoder(tokenizer, how.learn, how.day, how.values)
        self._num_ids = vocab_size(tokenizer)
        self._spans = with_full_spans(tokenizer)
        self._joins_pieces = not tokenizer.is_fast or joins_pieces(tokenizer)

    def encoded(self, bad_lines: BadLines) -> Iterator[list[tuple[Part, Encoded]]]:
        """Yield groups of parts with their ids, leaving out those that it adds to `bad_lines`. The
        next group is encoded in the background. Raises ConfigError if the tokenizer cannot tell
        which tokens to train on.
        """
        parts = self._corpus.parts(bad_lines)
        with ThreadPoolExecutor(max_workers=1) as pool:

            def begun() -> tuple[list[Part], Future[list[Encoded | str]]]:
                group = _next_group(parts)
                documents = [part.document for part in group]
                return group, pool.submit(self._encode, documents)

            group, results = begun()
            while group:
                coming = begun()
                good = []
                for part, result in zip(group, results.result(), strict=True):
                    if isinstance(result, str):
                        bad_lines.add(part.file, result, part.line)
                    else:
                        good.append((part, result))
                yield good
                group, results = coming

    def _encode(self, documents: list[Chat | Ids | Piece]) -> list[Encoded | str]:
        """Return the ids of each document, or the problem with it."""
        if self._chats is not None:  # all documents of a corpus are of one kind
            chats = [document for document in documents if isinstance(document, Chat)]
            others = [chat.rejected for chat in chats if chat.rejected is not None]
            encoded = self._of_chats(self._chats, chats + others)
            if not others:
                return encoded
            sides = zip(encoded[: len(chats)], encoded[len(chats) :], strict=True)
            return [_pair(*both) for both in sides]
        pieces = [document for document in documents if isinstance(document, Piece)]
        rows = [document for document in documents if isinstance(document, Ids)]
        return [*self._of_pieces(pieces), *map(self._of_ids, rows)]

    def _of_chats(self, encoder: ChatEncoder, chats: list[Chat]) -> list[Encoded | str]:
        rendered: list[Rendered | str] = []
        for chat in chats:
            try:
                rendered.append(encoder.render(chat))
            except ValueError as error:
                rendered.append(str(error))
            except RecursionError:  # from a call's arguments
                rendered.append("is nested too deeply")
        good = [result for result in rendered if not isinstance(result, str)]
        encoded = encoder.encode(good)
        return [result if isinstance(result, str) else next(encoded) for result in rendered]

    def _of_ids(self, document: Ids) -> Encoded | str:
        if outside := [token for token in document.ids if not 0 <= token < self._num_ids]:
            return (
                f"has the token id {outside[0]}, outside the tokenizer's {self._num_ids}: is "
                "data.tokenizer the one that wrote it?"
            )
        is_all = self._how.learn == "all"
        return Encoded(document.ids, [(0, len(document.ids))] if is_all else document.learned)

    def _of_pieces(self, pieces: list[Piece]) -> list[Encoded]:
        """Return the ids of pieces. Character offsets, which take a third longer, are computed only
        where part of a piece is trained on or a piece's ids depend on the text before it.
        """
        places = [self._needs_places(piece) for piece in pieces]
        both = [*zip(pieces, places, strict=True)]
        plain = iter(encode(self._tokenizer, [piece.text for piece, needs in both if not needs]))
        placed = iter(self._with_places([piece for piece, needs in both if needs]))
        return [
            self._of_piece(piece, *next(placed))
            if needs
            else self._of_piece(piece, next(plain), _NO_PLACES)
            for piece, needs in both
        ]

    def _needs_places(self, piece: Piece) -> bool:
        if piece.before and not self._joins_pieces:
            return True
        runs = None if self._how.learn == "all" else piece.learned
        return bool(runs) and runs != ((0, len(piece.text)),)

    def _with_places(self, pieces: list[Piece]) -> list[tuple[list[int], Places]]:
        """Return the ids that each piece has after the text before it, and each token's span."""
        if not self._tokenizer.is_fast:
            return [self._by_prefix(piece) for piece in pieces]
        befores = ["" if self._joins_pieces else piece.before for piece in pieces]
        texts = [before + piece.text for before, piece in zip(befores, pieces, strict=True)]
        results = []
        encoded = encode_with_offsets(self._spans, texts)
        for before, piece, (ids, places) in zip(befores, pieces, encoded, strict=True):
            kept = int(np.searchsorted(places[:, 1], len(before), side="right")) if before else 0
            if kept < len(ids) and places[kept, 0] < len(before):
                # A token spans the cut: split it, as a line end before the piece would.
                before = "\n"
                ((ids, places),) = encode_with_offsets(self._spans, [before + piece.text])
                kept = int(np.searchsorted(places[:, 1], len(before), side="right"))
            results.append((ids[kept:], places[kept:] - len(before)))
        return results

    def _by_prefix(self, piece: Piece) -> tuple[list[int], Places]:
        """Return ids and spans from a tokenizer without offsets. Tokens shared with the encoding of
        the untrained prefix alone belong to that prefix. Raises ConfigError unless everything after
        the prefix is trained on.
        """
        assert piece.learned, "asked for parts alone"
        if not _is_end(piece.learned, len(piece.text)):
            raise ConfigError(
                f"data.tokenizer: {type(self._tokenizer).__name__} gives no character offsets, so "
                "only the end of a text can be learned, but data.path has segments that are not "
                "learned after learned ones: use one with a tokenizer.json"
            )
        ids, before = encode(self._tokenizer, [piece.text, piece.text[: piece.learned[0][0]]])
        pairs = zip(ids, before, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(before)))
        places = np.full((len(ids), 2), [0, len(piece.text)], dtype=np.int64)
        places[:same] = 0
        return ids, places

    def _of_piece(self, piece: Piece, ids: list[int], places: Places) -> Encoded:
        runs = None if self._how.learn == "all" else piece.learned
        learned = [(0, len(ids))]
        if runs is not None and runs != ((0, len(piece.text)),):
            learned = tokens_of(places, [*runs]) if runs else []
        if piece.is_last and not self._is_closed(piece.text, ids):
            if piece.end_is_learned or self._how.learn == "all":
                learned.append((len(ids), len(ids) + 1))
            ids.append(self._tokenizer.eos_token_id)
        begin = [*self._how.begin]
        if not begin or piece.before:
            return Encoded(ids, learned)
        if ids[: len(begin)] != begin:  # otherwise the text already has them
            ids = begin + ids
            learned = [(start + len(begin), stop + len(begin)) for start, stop in learned]
        cut = [(max(start, len(begin)), stop) for start, stop in learned]
        return Encoded(ids, [(start, stop) for start, stop in cut if start < stop])

    def _is_closed(self, text: str, ids: list[int]) -> bool:
        """Return True if the text has an end-of-text token and only white space after it."""
        eos = self._tokenizer.eos_token_id
        if not text.rstrip().endswith(str(self._tokenizer.eos_token)) or eos not in ids:
            return False
        behind = ids[len(ids) - ids[::-1].index(eos) :]
        return not behind or not str(self._tokenizer.decode(behind)).strip()


def _pair(chosen: Encoded | str, rejected: Encoded | str) -> Encoded | str:
    """Return the sides of a preference as one document, or their problem."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        side, problem = ("chosen", chosen) if isinstance(chosen, str) else ("rejected", rejected)
        return f"{problem} (its {side} side)"
    if chosen.ids == rejected.ids:
        return "has the same text on both sides: nothing to prefer"
    first = len(chosen.ids)
    learned = [
        *chosen.learned,
        *((start + first, stop + first) for start, stop in rejected.learned),
    ]
    notes = [*chosen.notes, *(note for note in rejected.notes if note not in chosen.notes)]
    return Encoded(chosen.ids + rejected.ids, learned, notes, first)


def _is_end(runs: Sequence[tuple[int, int]], length: int) -> bool:
    """Return True if the runs are adjacent and reach the end of the text."""
    return [stop for _, stop in runs] == [*(start for start, _ in runs[1:]), length]


def _next_group(parts: Iterator[Part]) -> list[Part]:
    """Return the next parts to encode together; empty at the end."""
    group, characters = [], 0
    for part in islice(parts, PIECES_AT_ONCE):
        group.append(part)
        characters += part.num_characters
        if characters >= _CHARS_AT_ONCE:
            break
    return group
