"""Reads reports of tools/clean_data.py below the folder of runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from harness.config.assignments import MAX_FILE_BYTES
from harness.errors import Unusable
from harness.files.regular_file import read_json
from tools.cleaning.recipe import STEPS
from tools.cleaning.strictness import FILTERS
from tools.studio_app.runs import folders_with, root, stamp

_FILE = "report.json"
_MOST = 100
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
    """The documents that filters of some strictness keep."""

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
    """Return the folders of reports below the root, the newest first."""
    newest_first = sorted(
        folders_with((_FILE,)), key=lambda folder: (-stamp(folder / _FILE)[0], folder)
    )
    return [str(folder.relative_to(root())) for folder in newest_first[:_MOST]]


def read_cleaning(name: str) -> Cleaning:
    """Return the report in a folder of `names`. Raises ValueError for other names and bad
    reports.
    """
    if name not in names():
        raise ValueError(f"there is no report in {name!r}")
    path = root() / name / _FILE
    try:
        report = Cleaning.model_validate(read_json(path, MAX_FILE_BYTES))
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
