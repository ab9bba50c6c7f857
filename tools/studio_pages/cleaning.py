"""Cleaning data: documents passed through filters whose strictness a slider sets.

The documents are Python's own library, or the sample in a report of tools/clean_data.py.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from harness.config.assignments import MAX_FILE_BYTES
from harness.errors import Unusable
from harness.files.corpus import find_corpus
from harness.files.regular_file import read_json
from harness.report.chart import Curve, Mark, line, lines
from tools.cleaning.recipe import STEPS
from tools.cleaning.strictness import (
    FILTERS,
    STRICTNESS,
    Document,
    first_rejecting,
    measured,
    report_at,
)
from tools.studio_app.figures import Bars, Drawing, Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Slider, Values
from tools.studio_app.runs import folders_with, root, stamp
from tools.studio_app.svg import Svg, series

_OWN = "Python's own library"
_MOST_DOCUMENTS = 250
_MOST_CHARACTERS = 20_000
_FILE = "report.json"
_MOST_REPORTS = 100
Count = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]


class Left(BaseModel):
    """The documents that remain of a corpus or of its sample."""

    documents: Count
    characters: Count
    quality: Ratio
    """Share of words that are common in prose."""
    diversity: Count
    """Number of distinct words."""
    packing: Ratio
    """Compressed bytes per character, by zlib."""


class AtStrictness(Left):
    """The documents that filters of a strictness keep."""

    strictness: Annotated[int, Field(ge=0, le=100)]
    rejected: dict[str, Count]
    """Documents by the first filter that rejects them."""


class AfterStep(Left):
    """The documents of the sample that remain after a step of the recipe."""

    step: str


class Cleaning(BaseModel):
    """A report of tools/clean_data.py, limited to the fields that the page shows."""

    corpus: str
    documents: dict[str, Count]
    strictness: Annotated[list[AtStrictness], Field(min_length=1, max_length=101)]
    after_steps: Annotated[list[AfterStep], Field(max_length=1 + len(STEPS))]


def names() -> list[str]:
    """Return the folders of reports below the folder of runs, the newest first."""
    folders = sorted(folders_with((_FILE,)), key=lambda path: (-stamp(path / _FILE)[0], path))
    return [str(folder.relative_to(root())) for folder in folders[:_MOST_REPORTS]]


def read_cleaning(name: str) -> Cleaning:
    """Return the report in a folder of `names`. Raises ValueError for others and invalid ones."""
    if name not in names():
        raise ValueError(f"there is no report in {name!r}")
    try:
        report = Cleaning.model_validate(read_json(root() / name / _FILE, MAX_FILE_BYTES))
    except (OSError, Unusable) as error:
        raise ValueError(str(error).replace(f"{root()}/", "")) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(
            f"{name}/{_FILE} is not a report of tools/clean_data.py: {place}: {first['msg']}"
        ) from None
    rules = {rule.name for rule in FILTERS}
    unknown = {name for at in report.strictness for name in at.rejected} - rules
    unknown |= {each.step for each in report.after_steps} - {"read", *STEPS}
    if unknown:
        raise ValueError(
            f"{name}/{_FILE} comes from another version: it has {', '.join(sorted(unknown))}"
        )
    return report


def figures(values: Values) -> list[Figure]:
    """Return size, quality and diversity over all strictnesses, and one in detail."""
    own = values["corpus"] == _OWN
    report = None if own else read_cleaning(values["corpus"])
    points = report.strictness if report else [*map(cleaned, STRICTNESS)]
    whole = points[0]
    now = min(points, key=lambda point: abs(point.strictness - values["strictness"]))

    def curve(name: str, read: str) -> Curve:
        first = getattr(whole, read) or 1
        return line(name, [(at.strictness, 100 * getattr(at, read) / first) for at in points])

    scores = trade_off(points)
    best = max(scores, key=lambda pair: pair[1])[0]
    share = f"{now.characters / max(1, whole.characters):.1%}"
    rows = [
        (
            *(rule.name, rule.what, f"{rule.threshold(now.strictness):.3g}"),
            f"{now.rejected.get(rule.name, 0):,}",
        )
        for rule in FILTERS
    ]
    return [
        numbers(
            ("Documents kept", f"{now.documents:,} of {whole.documents:,}"),
            ("Size", share, f"{now.characters:,} characters"),
            ("Quality", f"{now.quality:.1%}", "words that are common in prose"),
            ("Diversity", f"{now.diversity:,}", "different words"),
            ("Packed", f"{now.packing:.3f}", "zlib bytes per character"),
        ),
        _recipe(report) if report else _squares(now),
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
            f"Filters at {now.strictness} %; a document counts at the first that rejects it",
            "filter|keeps if|threshold|rejects",
            rows,
        ),
        Bars(
            "Documents that each filter rejects",
            "documents",
            [f"{at.strictness} %" for at in points],
            {rule.name: [at.rejected.get(rule.name, 0) for at in points] for rule in FILTERS},
            height=300,
        ),
    ]


def trade_off(points: Sequence[AtStrictness]) -> list[tuple[float, float]]:
    """Return (strictness, harmonic mean of size and gain in quality, both from 0 to 1)."""
    whole, most = points[0], max(at.quality for at in points)
    scores = []
    for at in points:
        size = at.characters / (whole.characters or 1)
        gain = (at.quality - whole.quality) / ((most - whole.quality) or 1)
        scores.append((float(at.strictness), 2 * size * gain / ((size + gain) or 1)))
    return scores


def _recipe(report: Cleaning) -> Table:
    """Return what the recipe kept of the corpus, and of the sample step by step."""
    read, written = (report.documents.get(key, 0) for key in ("read", "written"))
    rows = [
        (
            each.step.replace("_", " "),
            f"{each.documents:,}",
            f"{each.characters:,}",
            f"{each.quality:.1%}",
            f"{each.diversity:,}",
            f"{each.packing:.3f}",
        )
        for each in report.after_steps
    ]
    head = "after step|documents|characters|quality|different words|zlib bytes"
    kept = f"{written:,} of {read:,} documents kept"
    return Table(
        f"{Path(report.corpus).name or report.corpus}: its recipe, on the sample; {kept} in all",
        head,
        rows,
    )


def _squares(now: AtStrictness) -> Drawing:
    """Return a square for each document, in the corpus's order."""
    each, columns, everything = 15.0, 50, documents()
    rules = [rule.name for rule in FILTERS]
    label = f"{now.documents} of {len(everything)} documents kept"
    picture = Svg(-(-len(everything) // columns) * each, label)
    for place, document in enumerate(everything):
        rule = first_rejecting(document, now.strictness)
        colour = "activations" if rule is None else series(rules.index(rule))
        why = "kept" if rule is None else f"rejected by {rule}"
        picture.rect(
            place % columns * each, place // columns * each, each - 2, each - 2, colour,
            opacity=1 if rule is None else 0.5, title=f"{document.name}: {why}",
        )  # fmt: skip
    legend = [("activations", "kept"), *((series(n), rule) for n, rule in enumerate(rules))]
    return Drawing("Every document: kept, or the filter that rejects it", str(picture), legend)


@lru_cache
def cleaned(strictness: int) -> AtStrictness:
    """Return what filters of a strictness leave of Python's own library, with their counts."""
    left = report_at(documents(), strictness)
    values = {"strictness": strictness, "rejected": left.rejected, **left.numbers()}
    return AtStrictness.model_validate(values)


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
    (
        Choice("corpus", "Corpus", lambda: (_OWN, *names()), _OWN),
        Slider("strictness", "Strictness", STRICTNESS, 80, "%", plays=True),
    ),
    figures,
    slow_at_first=({},),
)
