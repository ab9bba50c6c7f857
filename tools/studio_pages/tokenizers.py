"""The page of tokenizers: typed text cut by the harness's own tokenizer and by others."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from harness.data.corpus import find_corpus
from harness.data.tokenizer import SPACE, spm_model, to_backend, wrap
from tools.studio_app.charts import Axis, series_colour, stacked
from tools.studio_app.page import (
    Chart,
    Drawing,
    Figure,
    Number,
    Numbers,
    Page,
    Slider,
    Table,
    Typed,
    Values,
)
from tools.studio_app.svg import Svg

_SIZES = (512, 1024, 2048, 4096)
_CHARACTERS = 200_000
"""Of Python's own library, for training; the harness's own tokenizer learns from all of it."""
_WIDTH, _CHAR, _LINE = 760.0, 8.2, 25.0
_EXAMPLE = (
    "def tokenize(text):\n    return [piece for piece in text.split()]  # 12,345 naïve tokens"
)


def figures(values: Values) -> list[Figure]:
    """Return the pieces that each tokenizer makes of a text, and what they cost."""
    text, size = values["text"] or " ", values["size"]
    made = pieces(text, size)
    bytes_count = len(text.encode())
    vocabularies = {
        "bytes": 256,
        "words": len(set(text.split())) or 1,
        "BPE": size,
        "unigram": size,
    }
    rows = [
        (
            name,
            f"{vocabularies[name]:,}" if name != "words" else "every word that there is",
            f"{len(cut):,}",
            f"{bytes_count / len(cut):.2f}",
            f"{vocabularies[name] * values['hidden'] / 1e6:,.1f}" if name != "words" else "",
        )
        for name, cut in made.items()
    ]
    return [
        Numbers(
            [
                Number(name, f"{len(cut):,} tokens", f"{bytes_count / len(cut):.2f} bytes each")
                for name, cut in made.items()
            ]
        ),
        *(
            Drawing(f"{name}: {len(cut)} tokens", _picture(name, cut[:160]))
            for name, cut in made.items()
        ),
        Table(
            "Side by side",
            ("tokenizer", "vocabulary", "tokens", "bytes a token", "embedding, million weights"),
            rows,
        ),
        Chart(
            "Bytes a token on this text, by the size of the vocabulary",
            stacked(
                [f"{n:,}" for n in _SIZES],
                {
                    kind: [bytes_count / len(trained(kind, n)(text)) for n in _SIZES]
                    for kind in ("BPE", "unigram")
                },
                Axis("bytes a token"),
                together=False,
            ),
            280,
        ),
    ]


def pieces(text: str, size: int) -> dict[str, list[str]]:
    """Return the tokens of a text by tokenizer; spaces are part of them."""
    return {
        "bytes": [bytes([byte]).decode("latin-1") for byte in text.encode()],
        "words": [word for line in text.splitlines() for word in line.split()] or [text],
        "BPE": trained("BPE", size)(text),
        "unigram": trained("unigram", size)(text),
    }


@lru_cache
def trained(kind: str, size: int) -> Callable[[str], list[str]]:
    """Return a function that cuts a text, of a tokenizer trained on Python's own library.

    BPE is the harness's default: SentencePiece's training with its settings, and its way from
    there to a Hugging Face tokenizer. Unigram differs in the algorithm alone (arXiv 1808.06226).
    """
    import sentencepiece

    model = _model(kind, size)
    if kind == "BPE":
        tokenizer: Any = wrap(to_backend(model))

        def cut(text: str) -> list[str]:
            return list(tokenizer.tokenize(text)) or [text]
    else:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)

        def cut(text: str) -> list[str]:
            pieces = processor.encode(text, out_type=str)
            return [piece.replace(SPACE, " ") for piece in pieces] or [text]

    return cut


@lru_cache
def _model(kind: str, size: int) -> bytes:
    return spm_model(list(_sentences()), kind.lower(), size)


@lru_cache
def _sentences() -> tuple[str, ...]:
    """Return lines of Python's own library, an even share of its files."""
    lines: list[str] = []
    count = 0
    for number, piece in enumerate(find_corpus(None).pieces()):
        if number % 12 == 0:
            split = piece.text[:20_000].replace("\0", "").splitlines(keepends=True)
            lines += split
            count += sum(map(len, split))
        if count > _CHARACTERS:
            break
    return tuple(lines)


def _picture(name: str, cut: list[str]) -> str:
    """The tokens as boxes in a row, wrapped."""
    places, x, y = [], 0.0, 0.0
    for token in cut:
        shown = token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
        width = max(14.0, _CHAR * len(shown) + 6)
        if x + width > _WIDTH:
            x, y = 0.0, y + _LINE
        places.append((x, y, width, shown))
        x += width + 2
    picture = Svg(_WIDTH, y + _LINE, f"{name}: {' | '.join(cut)}"[:400])
    for number, (left, top, width, shown) in enumerate(places):
        colour = series_colour(number % 2 * 3)
        picture.rect(left, top, width, _LINE - 4, colour, radius=4, title=f"token {number}")
        middle = top + (_LINE - 4) / 2
        picture.text(left + width / 2, middle, shown, fill="on-colour", anchor="middle", size=12.5)
    return str(picture)


PAGE = Page(
    slug="tokenizers",
    title="Tokenizers compared",
    controls=(
        Typed("text", "Text", _EXAMPLE, 1_000, lines=3),
        Slider("size", "Vocabulary", _SIZES, 2048, "pieces"),
        Slider("hidden", "Width of the model", (256, 768, 1024, 2048, 4096, 8192), 4096),
    ),
    figures=figures,
    computed_by=(
        "tools.studio_pages.tokenizers.trained",
        "harness.data.tokenizer.spm_model",
        "harness.data.tokenizer.to_backend",
    ),
    formula="BPE joins the most frequent pair of pieces again and again; unigram keeps the pieces "
    "that make the text most probable. A larger vocabulary makes fewer tokens of a text, and more "
    "weights: vocabulary x width in the embedding, and as many in the head.",
    sources=(
        ("BPE, Sennrich et al., arXiv 1508.07909", "https://arxiv.org/abs/1508.07909"),
        ("Unigram, Kudo, arXiv 1804.10959", "https://arxiv.org/abs/1804.10959"),
    ),
    slow_at_first=({},),
)
