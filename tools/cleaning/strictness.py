"""Simulates filters of rising strictness on measured documents: size, quality and diversity."""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

STRICTNESS = tuple(range(0, 101, 5))


class Filter(NamedTuple):
    """A rule whose threshold goes from its loosest value (0 %) to its strictest (100 %)."""

    name: str
    what: str
    loosest: float
    strictest: float
    keeps_above: bool  # if True, documents with at least the threshold are kept

    def threshold(self, strictness: float) -> float:
        """Return the threshold at a strictness in percent."""
        return self.loosest + (self.strictest - self.loosest) * strictness / 100

    def keeps(self, measure: float, strictness: float) -> bool:
        """Return True if a document with this measure is kept."""
        limit = self.threshold(strictness)
        return measure >= limit if self.keeps_above else measure <= limit


FILTERS = (
    Filter("words", "words of the document, at least", 0, 400, True),
    Filter("word_length", "mean letters of a word, at most", 30, 6.0, False),
    Filter("letters", "share of characters that are letters, at least", 0.0, 0.62, True),
    Filter("short_lines", "share of lines with fewer than 3 words, at most", 1.0, 0.30, False),
    Filter("repeated_lines", "share of lines that are repeated, at most", 1.0, 0.08, False),
    Filter("top_word", "share of the most frequent word, at most", 1.0, 0.06, False),
)


@dataclass(frozen=True)
class Document:
    """The measures of a document."""

    name: str
    characters: int
    measures: dict[str, float]
    words: frozenset[str]  # distinct words, in lower case
    count: int  # words, with repetitions
    common: int  # words that are frequent in prose
    packed: int  # bytes after zlib compression


@dataclass(frozen=True)
class Report:
    """The part of a corpus that passes the rules at some strictness."""

    kept: tuple[Document, ...]
    rejected: Mapping[str, int]  # documents by the first rule that rejects them

    @cached_property
    def characters(self) -> int:
        """Number of characters kept."""
        return sum(document.characters for document in self.kept)

    @cached_property
    def quality(self) -> float:
        """Share of kept words that are among the 2,000 most frequent words of prose."""
        total = sum(document.count for document in self.kept)
        return sum(document.common for document in self.kept) / max(1, total)

    @cached_property
    def diversity(self) -> int:
        """Number of distinct words kept."""
        return len(frozenset().union(*(document.words for document in self.kept)))

    @cached_property
    def packing(self) -> float:
        """Compressed bytes per character; low for repetitive text."""
        return sum(document.packed for document in self.kept) / max(1, self.characters)

    def numbers(self) -> dict[str, float]:
        """Return documents, size, quality and diversity."""
        return {
            "documents": len(self.kept),
            "characters": self.characters,
            "quality": round(self.quality, 5),
            "diversity": self.diversity,
            "packing": round(self.packing, 5),
        }


def first_rejecting(document: Document, strictness: float) -> str | None:
    """Return the name of the first rule that rejects a document; None if all rules keep it."""
    names = (
        rule.name for rule in FILTERS if not rule.keeps(document.measures[rule.name], strictness)
    )
    return next(names, None)


def report_at(documents: Iterable[Document], strictness: float) -> Report:
    """Return the report of the documents that pass all rules at a strictness."""
    kept, rejected = [], Counter[str]()
    for document in documents:
        rule = first_rejecting(document, strictness)
        if rule is None:
            kept.append(document)
        else:
            rejected[rule] += 1
    return Report(tuple(kept), rejected)


def measured(name: str, text: str) -> Document:
    """Return a document's measures, by the rules of Gopher (arXiv 2112.11446, table A1)."""
    words = re.findall(r"[^\W\d_]+", text)
    rows = [line.strip() for line in text.splitlines() if line.strip()]
    counts = Counter(word.lower() for word in words)
    repeated = sum(count for count in Counter(rows).values() if count > 1)
    measures = {
        "words": float(len(words)),
        "word_length": sum(map(len, words)) / max(1, len(words)),
        "letters": sum(map(str.isalpha, text)) / max(1, len(text)),
        "short_lines": sum(len(row.split()) < 3 for row in rows) / max(1, len(rows)),
        "repeated_lines": repeated / max(1, len(rows)),
        "top_word": max(counts.values(), default=0) / max(1, len(words)),
    }
    common = sum(counts[word] for word in counts.keys() & _common())
    packed = len(zlib.compress(text.encode()))
    return Document(name, len(text), measures, frozenset(counts), len(words), common, packed)


@lru_cache
def _common() -> frozenset[str]:
    """Return the 2,000 most frequent words of Python's help pages, which are prose."""
    from pydoc_data.topics import topics

    words = Counter(
        word.lower() for page in topics.values() for word in re.findall(r"[^\W\d_]+", page)
    )
    return frozenset(word for word, _ in words.most_common(2_000))


def as_json(document: Document) -> dict[str, Any]:
    """Return a document as plain values for from_json."""
    return {**asdict(document), "words": sorted(document.words)}


def from_json(values: Mapping[str, Any]) -> Document:
    """Return the document that as_json wrote."""
    return Document(**{**values, "words": frozenset(values["words"])})
