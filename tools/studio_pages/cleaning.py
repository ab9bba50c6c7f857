"""Cleaning data: documents of Python's library, through filters whose strictness a slider sets."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from harness.files.corpus import find_corpus
from harness.report.chart import Curve, Mark, line, lines
from tools.cleaning.strictness import (
    FILTERS,
    STRICTNESS,
    Document,
    Report,
    first_rejecting,
    measured,
    report_at,
)
from tools.studio_app.figures import Bars, Drawing, Figure, Table, numbers
from tools.studio_app.page import Page, Slider, Values
from tools.studio_app.svg import Svg, series

_MOST_DOCUMENTS = 250
_MOST_CHARACTERS = 20_000


def figures(values: Values) -> list[Figure]:
    """Return size, quality and diversity over all strictnesses, and one in detail."""
    points = [*map(cleaned, STRICTNESS)]
    whole, at_now = points[0], values["strictness"]
    now = cleaned(at_now)

    def curve(name: str, read: str) -> Curve:
        first = getattr(whole, read) or 1
        sizes = [100 * getattr(left, read) / first for left in points]
        return line(name, [*zip(STRICTNESS, sizes, strict=True)])

    scores = trade_off(points)
    best = max(scores, key=lambda pair: pair[1])[0]
    share = f"{now.characters / max(1, whole.characters):.1%}"
    rows = [
        (
            *(rule.name, rule.what, f"{rule.threshold(at_now):.3g}"),
            f"{now.rejected.get(rule.name, 0):,}",
        )
        for rule in FILTERS
    ]
    return [
        numbers(
            ("Documents kept", f"{len(now.kept):,} of {len(whole.kept):,}"),
            ("Size", share, f"{now.characters:,} characters"),
            ("Quality", f"{now.quality:.1%}", "words that are common in prose"),
            ("Diversity", f"{now.diversity:,}", "different words"),
            ("Packed", f"{now.packing:.3f}", "zlib bytes per character"),
        ),
        _squares(now, at_now),
        lines(
            "Size, quality and diversity over strictness",
            [
                curve("size", "characters"),
                curve("quality", "quality"),
                curve("diversity", "diversity"),
                line("trade-off", [(at, 100 * score) for at, score in scores], style="dashed"),
            ],
            "strictness, %",
            "% of the corpus",
            marks=[Mark({"x": best}, "var(--good)", f"best: {best:g} %", is_named=True)],
            from_zero=True,
            height=340,
        ),
        Table(
            f"Filters at {at_now} %; a document counts at the first that rejects it",
            "filter|keeps if|threshold|rejects",
            rows,
        ),
        Bars(
            "Documents that each filter rejects",
            "documents",
            [f"{at} %" for at in STRICTNESS],
            {rule.name: [left.rejected.get(rule.name, 0) for left in points] for rule in FILTERS},
            height=300,
        ),
    ]


def trade_off(points: Sequence[Report]) -> list[tuple[float, float]]:
    """Return (strictness, harmonic mean of size and gain in quality, both from 0 to 1)."""
    whole, most = points[0], max(left.quality for left in points)
    scores = []
    for at, left in zip(STRICTNESS, points, strict=True):
        size = left.characters / (whole.characters or 1)
        gain = (left.quality - whole.quality) / ((most - whole.quality) or 1)
        scores.append((float(at), 2 * size * gain / ((size + gain) or 1)))
    return scores


def _squares(now: Report, strictness: int) -> Drawing:
    """Return a square for each document, in the corpus's order."""
    each, columns, everything = 15.0, 50, documents()
    rules = [rule.name for rule in FILTERS]
    label = f"{len(now.kept)} of {len(everything)} documents kept"
    picture = Svg(-(-len(everything) // columns) * each, label)
    for place, document in enumerate(everything):
        rule = first_rejecting(document, strictness)
        colour = "activations" if rule is None else series(rules.index(rule))
        why = "kept" if rule is None else f"rejected by {rule}"
        picture.rect(
            place % columns * each, place // columns * each, each - 2, each - 2, colour,
            opacity=1 if rule is None else 0.5, title=f"{document.name}: {why}",
        )  # fmt: skip
    legend = [("activations", "kept"), *((series(n), rule) for n, rule in enumerate(rules))]
    return Drawing("Every document: kept, or the filter that rejects it", str(picture), legend)


@lru_cache
def cleaned(strictness: int) -> Report:
    """Return what filters of a strictness leave of Python's own library."""
    return report_at(documents(), strictness)


@lru_cache
def documents() -> tuple[Document, ...]:
    """Return an even sample of the default corpus's documents, measured."""
    corpus = find_corpus(None)
    pieces = list(enumerate(corpus.pieces()))
    step = max(1, len(pieces) // _MOST_DOCUMENTS)
    return tuple(
        measured(Path(corpus.name_of(number)).name, piece.text[:_MOST_CHARACTERS])
        for number, piece in pieces[::step]
        if piece.text.strip()
    )


PAGE = Page(
    "cleaning",
    (Slider("strictness", "Strictness", STRICTNESS, 80, "%", plays=True),),
    figures,
    slow_at_first=({},),
)
