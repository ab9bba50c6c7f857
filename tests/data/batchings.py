"""Documents as plain lists, and every batching that the library can make of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from harness.data.batches import Contiguous, Stream
from harness.data.mixture import MixOrder, Mixture, Phase
from harness.data.packed_documents import TooLong, WholeWindows, write_whole
from harness.data.packing import Packed
from harness.data.padded import Padded, Pools
from harness.data.pair import IndexedTokens, Masks, MaskWriter, load_masks, write_indexed
from harness.data.split import SIDES, load_split, stores_separator, write_splits

EOS, SEQ_LEN, ROWS = 2, 8, 2
PAD_TO = 3  # does not divide SEQ_LEN
# Examples are the same in every run, so that a failure means a code change.
_HOW: dict[str, Any] = {"database": None, "deadline": None}
_HOW |= {"derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
PROPERTY = settings(max_examples=5, **_HOW)
Token = tuple[int, int]
"""A document and a position in it."""


@dataclass(frozen=True)
class Documents:
    """Token ids of documents with separators, and which of them are masked."""

    ids: list[list[int]]
    masked: list[list[bool]]
    is_stored: bool
    """False: the file stores no separators, and nothing is masked."""

    @classmethod
    def drawn(cls, sizes: list[int], seed: int, is_stored: bool = True) -> Documents:
        """Return documents of these sizes; any token may be masked."""
        draw = random.Random(seed)
        sizes = sizes if is_stored else [max(1, size) for size in sizes]
        ids = [[*(draw.randrange(3, 1000) for _ in range(size)), EOS] for size in sizes]
        share = draw.choice([0.1, 0.5, 0.9]) if is_stored else 0
        masked = [[*(draw.random() < share for _ in range(size)), False] for size in sizes]
        return cls(ids, masked, is_stored)

    def is_learned(self, token: Token) -> bool:
        """Return True unless a token is masked."""
        return not self.masked[token[0]][token[1]]


DOCUMENTS = st.builds(
    Documents.drawn,
    st.lists(st.integers(0, 20), min_size=6, max_size=14),
    st.integers(0, 1 << 16),
    st.booleans(),
)


def masks_of(folder: Path, documents: list[list[bool]]) -> Masks:
    """Write and open the masks of documents, given as one bool per token."""
    writer = MaskWriter()
    for masked in documents:
        for token in masked:
            writer.add(1, masked=token)
    writer.save(folder / "masks.npy")
    return load_masks(folder / "masks.npy")


class Corpus:
    """Documents on disk, with a train and a held-out split."""

    def __init__(self, folder: Path, documents: Documents, seed: int = 0) -> None:
        self._folder, self._seed, self.documents = folder, seed, documents
        ends = slice(None) if documents.is_stored else slice(-1)
        write_indexed(folder / "tokens", 1000, ((ids[ends], True) for ids in documents.ids))
        self.tokens = IndexedTokens(folder / "tokens")
        masks = masks_of(folder, documents.masked)
        adds_separator = not stores_separator(self.tokens, EOS)
        assert adds_separator != documents.is_stored
        write_splits(folder, self.tokens, masks, 0.4, add_separator=adds_separator)
        self._masks, self._adds_separator = masks, adds_separator

    def arguments(self, side: str = "train", **changes: object) -> dict[str, Any]:
        """Return the arguments of Packed for one split."""
        split, own = load_split(self._folder, side), {"seq_len": SEQ_LEN, "vocab_size": 1000}
        own |= {"tokens": self.tokens.ids, "split": split, "masks": self._masks, "eos_id": EOS}
        return {**own, "add_separator": self._adds_separator, **changes}

    def packed(self, side: str = "train", **changes: object) -> Packed:
        """Return the packed windows of one split."""
        return Packed(**self.arguments(side, **changes))

    def stream(self, side: str = "train") -> Stream:
        """Return those windows in the order of the seed."""
        return Stream(self.packed(side), self._seed, "f", document_mask=True)

    def whole(self, side: str = "train", too_long: TooLong = "cut", *, alone: bool) -> Stream:
        """Return samples of whole documents, one each if `alone`."""
        arguments = self.arguments(side)
        folder = self._folder / f"{alone}-{too_long}"
        folder.mkdir(exist_ok=True)
        write_whole(folder, side, Packed(**arguments), too_long, alone=alone)
        windows = WholeWindows(folder, side, alone=alone, **arguments)
        return Stream(windows, self._seed, "f", document_mask=True)

    def grouped(self, base: Stream, *, by_tokens: bool = False) -> Padded:
        """Return single documents in pools of 12 and groups of 4."""
        key = str(self._seed)
        pools = Pools(base.lengths, 12, 4, base.samples, base.length, key)
        return Padded(base, pools, pad_to=PAD_TO, by_tokens=by_tokens)

    def mixture(self, *streams: Stream) -> Mixture:
        """Return a mixture in which an epoch contains an epoch of each stream."""
        shares = tuple(Fraction(stream.samples) for stream in streams)
        return Mixture(streams, MixOrder([Phase(0, shares)], [None] * len(streams)))

    def both_alone(self) -> Mixture:
        """Return a mixture of both splits with one document per sample."""
        return self.mixture(*(self.whole(side, alone=True) for side in SIDES))


BATCHINGS: dict[str, Callable[[Corpus], Stream]] = {
    "packed": Corpus.stream,
    "whole": lambda corpus: corpus.whole(alone=False),
    "padded": lambda corpus: Padded(corpus.whole(alone=True), None, pad_to=PAD_TO),
    "length_grouped": lambda corpus: corpus.grouped(corpus.whole(alone=True)),
    "token_budget": lambda corpus: corpus.grouped(corpus.whole(alone=True), by_tokens=True),
    "mixture": lambda corpus: corpus.mixture(corpus.stream(), corpus.whole(SIDES[1], alone=False)),
    "grouped mixture": lambda corpus: corpus.grouped(corpus.both_alone()),
    "token_budget of a mixture": lambda corpus: corpus.grouped(corpus.both_alone(), by_tokens=True),
    "contiguous": lambda corpus: Contiguous(corpus.packed(), ROWS),
}


def tokens_learned(stream: Stream, documents: Documents) -> list[Token]:
    """Return the targets of an epoch by the definition of each batching."""
    if isinstance(stream, Padded):
        return tokens_learned(stream.base, documents)
    if isinstance(stream, Mixture):
        return [token for part in stream.streams for token in tokens_learned(part, documents)]
    return [token for token in _targets(stream, documents) if documents.is_learned(token)]


def _targets(stream: Stream, documents: Documents) -> Iterator[Token]:
    numbers = stream.packed.split.numbers[:-1].tolist()
    if stream.holds_whole_documents:
        for number in numbers:
            for place in range(1, min(SEQ_LEN, len(documents.ids[number]))):
                yield number, place
    else:
        joined = [(n, place) for n in numbers for place in range(len(documents.ids[n]))]
        yield from joined[1 : 1 + stream.samples * SEQ_LEN]
