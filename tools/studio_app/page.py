"""A page as data: its settings, and a pure function from their values to figures."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.studio_app.figures import Figure

Values = Mapping[str, Any]
"""The value of each control, by its name."""


class Lesson(NamedTuple):
    """The text of a page: see lessons.toml."""

    group: str
    title: str
    sees: str
    tries: str
    means: str
    command: str
    formula: str
    sources: Sequence[tuple[str, str]]
    computed_by: Sequence[str]


_TABLES = tomllib.loads(Path(__file__).with_name("lessons.toml").read_text(encoding="utf-8"))
ABOUT: dict[str, str] = {group: table.pop("about") for group, table in _TABLES.items()}
"""A sentence on each group of lessons."""
LESSONS = {
    slug: Lesson(group, **texts)
    for group, table in _TABLES.items()
    for slug, texts in table.items()
}


@dataclass(frozen=True)
class Slider:
    """One of several numbers in ascending order. `name` is its key in the page's address."""

    name: str
    label: str
    values: Sequence[float]
    default: float
    unit: str = ""
    one: str = ""
    """The unit of 1; "" if it is the same."""
    plays: bool = False
    """True for a step of an animation, which a button plays."""

    def read(self, text: str) -> float:
        """Return the value nearest to the one in an address; the default for no number."""
        try:
            number = float(text)
        except ValueError:
            return self.default
        if number != number:  # NaN is near to nothing
            return self.default
        return min(self.values, key=lambda value: abs(value - number))


@dataclass(frozen=True)
class Choice:
    """One of several words. `names`: those, or a function that looks them up each time."""

    name: str
    label: str
    names: Sequence[str] | Callable[[], Sequence[str]]
    default: str

    @property
    def options(self) -> Sequence[str]:
        """The words that there are now."""
        return self.names() if callable(self.names) else self.names

    def read(self, text: str) -> str:
        """Return the option of that name, or the default."""
        return text if text in self.options else self.default


@dataclass(frozen=True)
class Typed:
    """Text that a person types, cut off after `most` characters."""

    name: str
    label: str
    default: str
    most: int = 2_000
    lines: int = 1

    def read(self, text: str) -> str:
        """Return as much of the text as is taken."""
        return text[: self.most]


Control = Slider | Choice | Typed


@dataclass(frozen=True)
class Page:
    """One page of the studio. `slug` is its path, its file, and its key in lessons.toml."""

    slug: str
    controls: Sequence[Control]
    figures: Callable[[Values], list[Figure]]
    every_s: float | None = None
    """Seconds after which it is computed again, for what changes by itself."""
    slow_at_first: Sequence[Mapping[str, str]] = ()
    """Addresses whose first figures take seconds (imports, training) and are cached then."""

    @property
    def lesson(self) -> Lesson:
        """The page's text."""
        return LESSONS[self.slug]


def read_values(controls: Sequence[Control], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values in an address; the default of each that is absent or impossible."""
    return {
        each.name: each.read(query[each.name]) if each.name in query else each.default
        for each in controls
    }


def query_of(controls: Sequence[Control], values: Values) -> dict[str, str]:
    """Return the values that differ from the defaults, as an address has them."""
    return {
        each.name: format_value(values[each.name])
        for each in controls
        if values[each.name] != each.default
    }


def format_value(value: Any) -> str:
    """Return a value as text, from which it is read again."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """Return first, twice that, ..., last."""
    values = [first]
    while values[-1] < last:
        values.append(2 * values[-1])
    return tuple(values)
