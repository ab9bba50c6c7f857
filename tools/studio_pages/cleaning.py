"""The page of cleaning: real documents through filters of a strictness that a slider sets."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from harness.data.corpus import find_corpus
from tools.cleaning.strictness import (
    FILTERS,
    STRICTNESS,
    Document,
    Report,
    first_rejecting,
    measured,
    report_at,
)
from tools.studio_app.charts import Axis, Line, lines, stacked
from tools.studio_app.page import (
    Chart,
    Drawing,
    Figure,
    Number,
    Numbers,
    Page,
    Slider,
    Table,
    Values,
)
from tools.studio_app.svg import Svg

_MOST_DOCUMENTS = 250
_MOST_CHARACTERS = 20_000
_WIDTH = 760.0


def figures(values: Values) -> list[Figure]:
    """Return size, quality and diversity over all strictnesses, and one in detail."""
    reports = {strictness: cleaned(strictness) for strictness in STRICTNESS}
    now, whole = cleaned(values["strictness"]), reports[0]
    share = now.characters / whole.characters

    def curve(name: str, read: str) -> Line:
        first = getattr(whole, read)
        points = [(at, 100 * getattr(r, read) / first) for at, r in reports.items()]
        return Line(name, points)

    counts = [
        (
            rule.name,
            rule.what,
            f"{rule.threshold(values['strictness']):.3g}",
            f"{now.rejected[rule.name]:,}",
        )
        for rule in FILTERS
    ]
    return [
        Numbers(
            [
                Number("Documents kept", f"{len(now.kept):,} of {len(whole.kept):,}"),
                Number("Size", f"{share:.1%}", f"{now.characters:,} characters"),
                Number("Quality", f"{now.quality:.1%}", "words that are common in prose"),
                Number("Diversity", f"{now.diversity:,}", "different words"),
                Number("Packed", f"{now.packing:.3f}", "zlib bytes a character"),
            ]
        ),
        Drawing(
            "Every document: kept, or the filter that rejects it",
            _picture(whole, now, values["strictness"]),
        ),
        Chart(
            "Size, quality and diversity over strictness, % of the whole corpus",
            lines(
                [
                    curve("size", "characters"),
                    curve("quality", "quality"),
                    curve("diversity", "diversity"),
                ],
                Axis("strictness, %", low=0, high=100),
                Axis("%", low=0),
            ),
        ),
        Table(
            f"Filters at {values['strictness']} %; a document counts at the first that rejects it",
            ("filter", "keeps if", "threshold", "rejects"),
            counts,
        ),
        Chart(
            "Documents that each filter rejects",
            stacked(
                [f"{at} %" for at in reports],
                {
                    rule.name: [float(r.rejected[rule.name]) for r in reports.values()]
                    for rule in FILTERS
                },
                Axis("documents"),
            ),
            300,
        ),
    ]


@lru_cache
def cleaned(strictness: int) -> Report:
    """Return what filters of a strictness leave of Python's own library, with their counts."""
    return report_at(documents(), strictness)


@lru_cache
def documents() -> tuple[Document, ...]:
    """Return documents of the default corpus, evenly taken from all, measured."""
    corpus = find_corpus(None)
    pieces = list(enumerate(corpus.pieces()))
    step = max(1, len(pieces) // _MOST_DOCUMENTS)
    return tuple(
        measured(Path(corpus.name_of(number)).name, piece.text[:_MOST_CHARACTERS])
        for number, piece in pieces[::step]
        if piece.text.strip()
    )


def _picture(whole: Report, now: Report, strictness: float) -> str:
    """A square for each document, in the corpus's order."""
    each, columns = 15.0, 50
    everything = list(whole.kept)
    rows = -(-len(everything) // columns)
    picture = Svg(_WIDTH, rows * each + 44, f"{len(now.kept)} of {len(everything)} documents kept")
    names_of_rules = [rule.name for rule in FILTERS]
    for place, document in enumerate(everything):
        rule = first_rejecting(document, strictness)
        is_kept = rule is None
        colour = "activations" if rule is None else f"series-{names_of_rules.index(rule) % 8 + 1}"
        why = "kept" if rule is None else f"rejected by {rule}"
        picture.rect(
            place % columns * each, place // columns * each, each - 2, each - 2, colour,
            opacity=1 if is_kept else 0.35, title=f"{document.name}: {why}",
        )  # fmt: skip
    names = [("activations", "kept", 1.0)]
    names += [(f"series-{n % 8 + 1}", rule.name, 0.35) for n, rule in enumerate(FILTERS)]
    for place, (colour, text, opacity) in enumerate(names):
        left, top = place * 108, rows * each + 16
        picture.rect(left, top, 12, 12, colour, opacity=opacity)
        picture.text(left + 16, top + 6, text, size=11.5, fill="muted")
    return str(picture)


PAGE = Page(
    slug="cleaning",
    title="Cleaning data",
    group="Data",
    sees="Documents of Python's own library through six filters: the stricter they are, the less "
    "is left, the more of it reads like prose, and the fewer different words it has.",
    controls=(Slider("strictness", "Strictness", STRICTNESS, 80, "%", plays=True),),
    figures=figures,
    computed_by=(
        "tools.studio_pages.cleaning.cleaned",
        "tools.cleaning.strictness.measured",
        "harness.data.corpus.find_corpus",
    ),
    formula="A document is kept if every measure is on the right side of its threshold, which goes "
    "linearly from its loosest to its strictest value. The filters are this page's own, after "
    "Gopher's rules; tools/clean_data.py counts the same on your corpus. "
    "Quality here is the share of words common in prose.",
    sources=(
        ("Gopher, arXiv 2112.11446, table A1", "https://arxiv.org/abs/2112.11446"),
        ("FineWeb, arXiv 2406.17557", "https://arxiv.org/abs/2406.17557"),
    ),
    slow_at_first=({},),
)
