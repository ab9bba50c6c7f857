"""Parts of documents as token ids, a group at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from transformers import PreTrainedTokenizerBase

from harness.data.chat_tokens import ChatEncoder, Encoded, Spans
from harness.data.corpus import Corpus, Part
from harness.data.tokenizer import PIECES_AT_ONCE, encode
from harness.files.chat import Chat
from harness.files.data_format import BadLines
from harness.files.pieces import Piece

# Most characters tokenised at once: a tokenizer takes a hundred bytes per character.
_CHARS_AT_ONCE = 1 << 22


class Encoder:
    """A tokenizer that adds the separator to documents and knows what of them is learned."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, learn: str) -> None:
        """Raises ConfigError if a corpus of conversations has no chat template."""
        self._corpus, self._tokenizer, self._learn = corpus, tokenizer, learn
        self._chats = ChatEncoder(tokenizer, learn) if corpus.holds_chats else None

    def encoded(self, bad_lines: BadLines) -> Iterator[list[tuple[Part, Encoded]]]:
        """Yield groups of parts with their ids, without those that are added to `bad_lines`; the
        next group is encoded in the background.
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

    def _encode(self, documents: list[Chat | Piece]) -> list[Encoded | str]:
        """Return the ids of each document, or the problem with it."""
        pieces = [document for document in documents if isinstance(document, Piece)]
        of_pieces = iter(encode(self._tokenizer, [piece.text for piece in pieces]))
        rendered: list[tuple[str, Spans] | str] = []
        for chat in documents:
            if isinstance(chat, Chat):
                assert self._chats is not None, "the first document says whether all are chats"
                try:
                    rendered.append(self._chats.render(chat))
                except ValueError as error:
                    rendered.append(str(error))
        good = [result for result in rendered if not isinstance(result, str)]
        if self._chats is not None:
            of_chats = self._chats.encode([text for text, _ in good], [spans for _, spans in good])
        texts = iter(rendered)
        results: list[Encoded | str] = []
        for document in documents:
            if isinstance(document, Piece):
                results.append(self._of_piece(document, next(of_pieces)))
            else:
                result = next(texts)
                results.append(result if isinstance(result, str) else next(of_chats))
        return results

    def _of_piece(self, piece: Piece, ids: list[int]) -> Encoded:
        learned = [(0, len(ids))] if piece.is_learned or self._learn == "all" else []
        if piece.is_last:
            learned.append((len(ids), len(ids) + 1))
            ids.append(self._tokenizer.eos_token_id)
        return Encoded(ids, learned)


def _next_group(parts: Iterator[Part]) -> list[Part]:
    """Return the next parts to encode together; none at the end."""
    group, characters = [], 0
    for part in islice(parts, PIECES_AT_ONCE):
        group.append(part)
        characters += part.num_characters
        if characters >= _CHARS_AT_ONCE:
            break
    return group
