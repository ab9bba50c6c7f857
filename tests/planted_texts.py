"""Texts with planted duplicates and personal data, and the share that cleaning finds."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tools.clean_data import main as clean

SECRETS = ("email", "IP", "phone")


def recall(folder: Path, duplicates: int, of_a_kind: int) -> dict[str, float]:
    """Return the share of planted exact duplicates, near duplicates and secrets that cleaning
    finds.
    """
    folder.mkdir()
    draw, words = random.Random(1), frequent_words()
    originals = [prose(draw, words, 200) for _ in range(2 * duplicates)]
    texts = originals + originals[:duplicates]
    texts += [near_duplicate(draw, text, words) for text in originals[duplicates:]]
    secrets = [(kind, drawn_secret(draw, kind)) for kind in SECRETS for _ in range(of_a_kind)]
    for _, secret in secrets:
        before, after = prose(draw, words, 60), prose(draw, words, 60)
        texts.append(f"{before} Write or call {secret} today. {after}")
    draw.shuffle(texts)
    path = folder / "planted.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert clean([str(path), str(folder / "out"), "gopher_quality=false"]) == 0
    kept = "".join(file.read_text() for file in (folder / "out" / "data").glob("*.jsonl"))
    found = {}
    for step in ("exact_duplicates", "near_duplicates"):
        removed = (folder / "out" / "removed" / step).glob("*")
        found[step] = sum(len(file.read_text().splitlines()) for file in removed) / duplicates
    for kind in SECRETS:
        found[kind] = (
            sum(planted_kind == kind and text not in kept for planted_kind, text in secrets)
            / of_a_kind
        )
    return found


def prose(draw: random.Random, words: list[str], count: int) -> str:
    """Return sentences of words with natural frequencies in random order."""
    sentences = []
    while count > 0:
        length = draw.randrange(6, 25)
        chosen = draw.choices(words, k=length)
        sentences.append(f"{' '.join(chosen).capitalize()}.")
        count -= length
    return " ".join(sentences)


def frequent_words() -> list[str]:
    """Return the words of Python's documentation with their repetitions."""
    from pydoc_data.topics import topics

    return [
        word.lower()
        for name in sorted(topics)
        for word in topics[name].split()
        if word.isalpha() and (len(word) > 1 or word == "a")
    ]


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


def near_duplicate(draw: random.Random, text: str, words: list[str]) -> str:
    """Return a text with words replaced until its similarity is just above 0.8."""
    changed = text.split()
    near = text
    while True:
        changed[draw.randrange(len(changed))] = draw.choice(words)
        following = " ".join(changed)
        if _jaccard(text, following) < 0.8:
            return near
        near = following


def _jaccard(one: str, two: str) -> float:
    from datatrove.utils.text import ngrams, simplify_text

    from tools.cleaning.steps import RegexWords

    cut = RegexWords().word_tokenize
    a, b = (set(ngrams(cut(simplify_text(text)), 5)) for text in (one, two))
    return len(a & b) / len(a | b)
