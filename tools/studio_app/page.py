"""A page as data: its settings, and a pure function from their values to figures."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.studio_app.figures import Figure

Values = Mapping[str, Any]
"""The value of each control, by name."""


class Lesson(NamedTuple):
    """The text of a page, from lessons.toml."""

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
"""A sentence about each group of lessons."""
LESSONS = {
    slug: Lesson(group, **texts)
    for group, table in _TABLES.items()
    for slug, texts in table.items()
}


@dataclass(frozen=True)
class Slider:
    """Chooses one of several numbers in ascending order. `name` is its key in the page's
    address.
    """

    name: str
    label: str
    values: Sequence[float]
    default: float
    unit: str = ""
    one: str = ""
    """Unit for the value 1; "" if it is the same."""
    plays: bool = False
    """True for a step of an animation, which a button plays."""

    def read(self, text: str) -> float:
        """Return the value nearest to the number in an address; the default if it is not a
        number.
        """
        try:
            number = float(text)
        except ValueError:
            return self.default
        if number != number:  # NaN is not near any value
            return self.default
        return min(self.values, key=lambda value: abs(value - number))


@dataclass(frozen=True)
class Choice:
    """Chooses one of several words. `names` is a list, or a function that is called each time."""

    name: str
    label: str
    names: Sequence[str] | Callable[[], Sequence[str]]
    default: str

    @property
    def options(self) -> Sequence[str]:
        """The words currently available."""
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
        """Return the text up to its limit."""
        return text[: self.most]


Control = Slider | Choice | Typed


@dataclass(frozen=True)
class Page:
    """One page of the studio. `slug` is its path, its file, and its key in lessons.toml."""

    slug: str
    controls: Sequence[Control]
    figures: Callable[[Values], list[Figure]]
    every_s: float | None = None
    """Interval in seconds at which the page is recomputed; None if its figures do not change."""
    slow_at_first: Sequence[Mapping[str, str]] = ()
    """Addresses whose figures take seconds at first (imports, training) and are cached
    afterwards.
    """

    @property
    def lesson(self) -> Lesson:
        """The page's text."""
        return LESSONS[self.slug]


def read_values(controls: Sequence[Control], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values in an address; missing or invalid ones take their defaults."""
    return {
        each.name: each.read(query[each.name]) if each.name in query else each.default
        for each in controls
    }


def not_shown(controls: Sequence[Control], query: Mapping[str, str]) -> list[str]:
    """Return a sentence for each value in an address that the page does not show."""
    known = {each.name: each for each in controls}
    sentences = [f"{name} is no setting of this page" for name in query if name not in known]
    for name, control in known.items():
        text = query.get(name)
        if text is None or isinstance(control, Typed):  # any text is shown
            continue
        shown = format_value(control.read(text))
        if text not in (shown, f"{shown}.0"):
            sentences.append(f"{name}={text[:40]} is none of its values; shown: {shown or 'none'}")
    return sentences


def query_of(controls: Sequence[Control], values: Values) -> dict[str, str]:
    """Return the values that differ from the defaults, as query parameters."""
    return {
        each.name: format_value(values[each.name])
        for each in controls
        if values[each.name] != each.default
    }


def format_value(value: Any) -> str:
    """Return a value as text that can be read back."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """Return (first, 2 * first, ..., last)."""
    values = [first]
    while values[-1] < last:
        values.append(2 * values[-1])
    return tuple(values)
