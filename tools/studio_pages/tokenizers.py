"""Tokenizers compared: typed text cut by the harness's own tokenizer and by others."""

from collections.abc import Callable
from functools import lru_cache
from html import escape
from typing import Any

from harness.data.tokenizer import SPACE, spm_model, to_backend, wrap
from harness.files.corpus import find_corpus
from harness.report.chart import Chart, Mark, line, lines
from tools.studio_app.figures import Bars, Drawing, Figure, Table, numbers
from tools.studio_app.page import Page, Slider, Typed, Values

_SIZES = (512, 1024, 2048, 4096)
_TRAINED = ("BPE", "unigram")
_CHARACTERS = 200_000
"""Characters of Python's own library to train on; train.py's default tokenizer reads all of it."""
_EXAMPLE = (
    "def tokenize(text):\n    return [piece for piece in text.split()]  # 12,345 naïve tokens"
)


def figures(values: Values) -> list[Figure]:
    """Return the pieces that each tokenizer splits a text into, and what they cost."""
    text, size = values["text"] or " ", values["size"]
    made, length = pieces(text, size), len(text.encode())
    vocabularies = {"bytes": 256, "BPE": size, "unigram": size}
    rows = []
    for name, cut in made.items():
        count = vocabularies.get(name)
        shown = f"{count:,}" if count else "every word that there is"
        weights = f"{count * values['hidden'] / 1e6:,.1f}" if count else ""
        rows.append((name, shown, f"{len(cut):,}", f"{length / len(cut):.2f}", weights))
    by_size = {kind: [length / len(trained(kind, n)(text)) for n in _SIZES] for kind in _TRAINED}
    return [
        numbers(*((row[0], f"{row[2]} tokens", f"{row[3]} bytes each") for row in rows)),
        *(Drawing(f"{name}: {len(cut)} tokens", _picture(cut[:160])) for name, cut in made.items()),
        Table(
            "Side by side",
            "tokenizer|vocabulary|tokens|bytes per token|embedding, million weights",
            rows,
        ),
        Bars(
            "Bytes per token on this text, by the size of the vocabulary",
            "",
            [f"{n:,}" for n in _SIZES],
            by_size,
            together=False,
            height=280,
        ),
        _arithmetic(text, values["hidden"]),
    ]


def operations(kind: str, size: int, text: str, hidden: int) -> float:
    """Return a model's multiplications per byte of text, in millions.

    12 x width^2 weights in each of width / 128 layers, and vocabulary x width in the head.
    """
    weights = 12 * hidden**3 / 128 + size * hidden
    return weights * len(trained(kind, size)(text)) / len(text.encode()) / 1e6


def _arithmetic(text: str, hidden: int) -> Chart:
    curves = {
        kind: [(size, operations(kind, size, text, hidden)) for size in _SIZES] for kind in _TRAINED
    }
    best = min(curves["BPE"], key=lambda point: point[1])[0]
    # At an end of the range, the minimum may lie beyond it.
    word = "best" if _SIZES[0] < best < _SIZES[-1] else "lowest of these"
    return lines(
        f"Million multiplications per byte of this text; {word} for BPE: {best:,} pieces",
        [line(kind, points) for kind, points in curves.items()],
        "vocabulary",
        marks=[Mark({"x": best}, "var(--good)", word, is_named=True)],
        from_zero=True,
        log_x=True,
        x_range=(_SIZES[0], _SIZES[-1]),
        height=280,
    )


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
    """Return the splitting function of a tokenizer trained on Python's standard library.

    BPE is the harness's default tokenizer; unigram differs in its algorithm (arXiv 1808.06226).
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
    """Return the lines of every 12th file of Python's own library, up to _CHARACTERS."""
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


def _picture(cut: list[str]) -> str:
    """Return the tokens as boxes, as many on a line as there is room for."""
    boxes = []
    for number, token in enumerate(cut):
        shown = token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
        colour = "series-4" if number % 2 else "series-1"
        boxes.append(f'<span style="background:var(--{colour})">{escape(shown)}</span>')
    return f'<div class="tokens">{"".join(boxes)}</div>'


PAGE = Page(
    "tokenizers",
    (
        Typed("text", "Text", _EXAMPLE, 1_000, lines=3),
        Slider("size", "Vocabulary", _SIZES, 2048, "pieces"),
        Slider("hidden", "Hidden size of the model", (256, 768, 1024, 2048, 4096, 8192), 4096),
    ),
    figures,
    slow_at_first=({},),
)
