"""Texts with planted duplicates and personal data."""

from __future__ import annotations

import json
import random
from pathlib import Path

FILES, FILE_BYTES = 2, 4_300_000


def prose(draw: random.Random, words: list[str], count: int) -> str:
    """Sentences of words in their natural frequencies, in no natural order."""
    sentences = []
    while count > 0:
        length = draw.randrange(6, 25)
        chosen = draw.choices(words, k=length)
        sentences.append(f"{' '.join(chosen).capitalize()}.")
        count -= length
    return " ".join(sentences)


def frequent_words() -> list[str]:
    """Return the words of Python's documentation, each as often as it occurs."""
    from pydoc_data.topics import topics

    return [
        word.lower()
        for name in sorted(topics)
        for word in topics[name].split()
        if word.isalpha() and (len(word) > 1 or word == "a")
    ]


def write_corpus(folder: Path) -> None:
    """Prose, sources of Python's library, duplicates and personal data, in a few files."""
    from harness.data.corpus import find_corpus

    folder.mkdir()
    draw, words = random.Random(0), frequent_words()
    code = [piece.text[:6000] for piece in find_corpus(None).pieces()][:200]
    for number in range(FILES):
        texts: list[str] = []
        size = 0
        while size < FILE_BYTES:
            kind = draw.random()
            if kind < 0.06 and texts:
                text = draw.choice(texts)
            elif kind < 0.12:
                text = draw.choice(code)
            else:
                text = prose(draw, words, draw.randrange(30, 900))
                if kind < 0.2:
                    text += f" Write to {drawn_secret(draw, 'email')}."
            texts.append(text)
            size += len(text) + 20
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number}.jsonl").write_text("".join(lines))


def drawn_secret(draw: random.Random, kind: str) -> str:
    """Return an e-mail address, IP address or telephone number."""

    def name() -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=7))

    def digits(count: int) -> str:
        return "".join(draw.choices("123456789", k=count))

    area = f"{draw.randrange(2, 10)}{digits(2)}"
    forms = {
        "email": [f"{name()}@{name()}.com", f"{name()}.{name()}+x@mail.{name()}.co.uk"],
        "IP": [f"{draw.randrange(11, 99)}.{draw.randrange(256)}.{draw.randrange(256)}.7"],
        "phone": [
            *(f"+49 {digits(3)} {digits(7)}", f"({area}) 555-{digits(4)}"),
            *(
                f"+1-{area}-555-{digits(4)}",
                f"00{digits(2)} {digits(2)} {digits(4)} {digits(4)}",
            ),
            f"2{digits(2)}.{digits(3)}.{digits(4)}",
        ],
    }
    return draw.choice(forms[kind])


def near_duplicate(draw: random.Random, text: str, words: list[str]) -> tuple[str, float]:
    """Return a text with words replaced until its similarity is just above 0.8."""
    changed = text.split()
    near, likeness = text, 1.0
    while True:
        changed[draw.randrange(len(changed))] = draw.choice(words)
        following = " ".join(changed)
        is_like = _jaccard(text, following)
        if is_like < 0.8:
            return near, likeness
        near, likeness = following, is_like


def _jaccard(one: str, two: str) -> float:
    from datatrove.utils.text import ngrams, simplify_text

    from tools.cleaning.words import RegexWords

    cut = RegexWords().word_tokenize
    a, b = (set(ngrams(cut(simplify_text(text)), 5)) for text in (one, two))
    return len(a & b) / len(a | b)
