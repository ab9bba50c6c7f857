"""A page as data: its controls, and a pure function from their values to figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Values = Mapping[str, Any]
"""The value of each control, by its name."""


@dataclass(frozen=True)
class Slider:
    """One of several numbers, in ascending order."""

    name: str
    """Its key in the address of the page."""
    label: str
    values: Sequence[float]
    default: float
    unit: str = ""
    one: str = ""
    """The unit of 1; "" if it is the same."""
    plays: bool = False
    """True if it is a step of an animation, which a button plays."""

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
    """Text that a person types."""

    name: str
    label: str
    default: str
    most: int = 2_000
    """Characters; the rest is cut off."""
    lines: int = 1

    def read(self, text: str) -> str:
        """Return as much of the text as is taken."""
        return text[: self.most]


Control = Slider | Choice | Typed
Verdict = Literal["good", "warning", "bad"]


@dataclass(frozen=True)
class Number:
    """A figure with its label; `note` explains it."""

    label: str
    text: str
    note: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Numbers:
    """Figures side by side."""

    numbers: Sequence[Number]


@dataclass(frozen=True)
class Chart:
    """An ECharts chart; `options` as charts.py makes them."""

    title: str
    options: dict[str, Any]
    height: int = 340
    """Pixels."""

    @property
    def legend(self) -> Legend:
        """The colours of its curves or bars, if there are several."""
        names = {one["name"]: one["legend"] for one in self.options["series"] if "legend" in one}
        return [(colour, name) for name, colour in names.items()] if len(names) > 1 else []


Legend = Sequence[tuple[str, str]]
"""(name of a colour of the palette, what it stands for), of a picture or a chart."""


@dataclass(frozen=True)
class Drawing:
    """A picture as SVG (svg.py), as wide as its window."""

    title: str
    svg: str
    legend: Legend = ()


@dataclass(frozen=True)
class Table:
    """Rows of text; `links` are addresses of rows' first cells."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    links: Sequence[str | None] = ()


@dataclass(frozen=True)
class Links:
    """(text, address) of other pages of the studio."""

    title: str
    links: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code:
    """Text to copy."""

    title: str
    text: str


@dataclass(frozen=True)
class Note:
    """A sentence."""

    text: str
    verdict: Verdict | None = None


Figure = Numbers | Chart | Drawing | Table | Links | Code | Note


@dataclass(frozen=True)
class Page:
    """One page of the studio."""

    slug: str
    """Its path, its file, and its key in lessons.toml."""
    title: str
    controls: Sequence[Control]
    figures: Callable[[Values], list[Figure]]
    computed_by: Sequence[str]
    """Dotted names of the functions that give the numbers."""
    formula: str
    sources: Sequence[tuple[str, str]]
    """(text, address) of the formula."""
    every_s: float | None = None
    """Seconds after which it is computed again, for what changes by itself."""
    slow_at_first: Sequence[Mapping[str, str]] = ()
    """Addresses whose first figures take seconds, of imports or training, and are kept then."""


def read_values(controls: Sequence[Control], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values in an address; the default of each that is absent or cannot be."""
    return {
        control.name: control.read(query[control.name])
        if control.name in query
        else control.default
        for control in controls
    }


def query_of(controls: Sequence[Control], values: Values) -> dict[str, str]:
    """Return the values that are not the defaults, as an address has them."""
    return {
        control.name: format_value(values[control.name])
        for control in controls
        if values[control.name] != control.default
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
