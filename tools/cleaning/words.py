"""Words and sentences of any language, by rules, in place of datatrove's spaCy models."""

from __future__ import annotations

from collections.abc import Iterator

import regex
from datatrove.utils.text import TERMINAL_PUNCTUATION
from datatrove.utils.word_tokenizers import WordTokenizer

# A letter of a script that is written without spaces is a word; punctuation is one each.
_WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
    r"|[\w--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]+"
    r"(?:['\u2019][\w--[\p{Han}\p{Hiragana}\p{Katakana}]]+)*"
    r"|[^\w\s]",
    regex.V1,
)
_ENDS = regex.escape("".join(sorted(TERMINAL_PUNCTUATION)))
_SENTENCE = regex.compile(rf"[^{_ENDS}\n]+(?:[{_ENDS}]+[\"'\u201d\u2019)]*|\n|$)")


class RegexWords(WordTokenizer):
    """Words by a regular expression."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return words and punctuation marks."""
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Return sentences without the space around them."""
        return [stripped for a, b in self._spans(text) if (stripped := text[a:b].strip())]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return the places of sentences that are not blank."""
        return [(a, b) for a, b in self._spans(text) if text[a:b].strip()]

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        for sentence in _SENTENCE.finditer(text):
            yield sentence.span()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RegexWords)

    def __hash__(self) -> int:
        return hash(RegexWords)


def words_of(named: str) -> WordTokenizer | str:
    """Return what datatrove's steps take as their language."""
    return RegexWords() if named == "regex" else "en"
