"""All pages in the order of lessons.toml, with the text beside each."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tools.studio_app.page import Page


class Lesson(NamedTuple):
    """The text beside a page's pictures."""

    group: str
    """The lessons that it belongs to."""
    sees: str
    """What the pictures show."""
    tries: str
    """Which control to move, and what follows."""
    means: str
    """What it means in a real run."""
    command: str
    """The command of such a run."""


_TABLES = tomllib.loads(Path(__file__).with_name("lessons.toml").read_text(encoding="utf-8"))
ABOUT: dict[str, str] = {group: table.pop("about") for group, table in _TABLES.items()}
"""A sentence on each group of lessons."""
LESSONS = {
    slug: Lesson(group, **texts)
    for group, table in _TABLES.items()
    for slug, texts in table.items()
}
PAGES: tuple[Page, ...] = tuple(
    import_module(f"tools.studio_pages.{slug}").PAGE for slug in LESSONS
)
