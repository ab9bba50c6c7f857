"""Plots of a sweep as inline SVG: curves, parallel coordinates, slices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tools.sweeps.cost import Record
from tools.sweeps.space import Dimension, Values
from tools.sweeps.spec import Sweep
from tools.sweeps.text import best_of, ranked, short_names, shown, values_text

_MOST_TICKS = 6


@dataclass(frozen=True)
class Axis:
    """An axis from 0 to 1."""

    name: str
    low: float
    high: float
    log: bool = False
    words: tuple[str, ...] = ()
    """Categories, one step apart; empty for numbers."""

    @classmethod
    def of(cls, name: str, dimension: Dimension) -> Axis:
        """Return the axis of a key that is searched."""
        if isinstance(dimension, Values):
            return cls(name, -0.5, len(dimension.values) - 0.5, words=dimension.values)
        return cls(name, dimension.from_, dimension.to, dimension.log)

    @classmethod
    def over(cls, name: str, numbers: Sequence[float]) -> Axis:
        """Return an axis that shows some numbers, with room at both ends."""
        low, high = min(numbers, default=0.0), max(numbers, default=1.0)
        room = (high - low or abs(high) or 1.0) * 0.06
        return cls(name, low - room, high + room)

    def place(self, value: str | float) -> float:
        """Return the place of a value, 0 to 1."""
        number = float(self.words.index(str(value))) if self.words else float(value)
        if self.log:
            return math.log(number / self.low) / math.log(self.high / self.low)
        return (number - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return places and their labels."""
        if self.words:
            return [(self.place(word), word) for word in self.words]
        numbers = self._powers() if self.log else self._round_numbers()
        return [(self.place(number), f"{number:,.6g}") for number in numbers]

    def _powers(self) -> list[float]:
        first, last = (
            math.ceil(math.log10(self.low) - 1e-9),
            math.floor(math.log10(self.high) + 1e-9),
        )
        apart = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
        powers = [10.0**power for power in range(first, last + 1, apart)]
        return powers if len(powers) > 1 else [self.low, self.high]

    def _round_numbers(self) -> list[float]:
        rough = (self.high - self.low) / (_MOST_TICKS - 1)
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


Curve = Sequence[tuple[int, float]]
"""Steps and the metric after them."""


@dataclass(frozen=True)
class Area:
    """An SVG and the part of it that data fills."""

    width: int
    height: int
    left: int = 58
    right: int = 14
    top: int = 14
    bottom: int = 42

    def x(self, place: float) -> float:
        """Return the x of a place from 0 to 1."""
        return self.left + place * (self.width - self.left - self.right)

    def y(self, place: float) -> float:
        """Return the y of a place from 0 to 1."""
        return self.height - self.bottom - place * (self.height - self.top - self.bottom)


_SLICE = Area(330, 240)
_WIDE = Area(760, 340)
_AXES = Area(760, 340, left=70, right=30)


class Plots:
    """The plots of what the trials came to so far."""

    def __init__(self, sweep: Sweep, records: Sequence[Record]) -> None:
        self._sweep, self._metric = sweep, sweep.settings.metric
        # The best last: above the others.
        self._records = [of for of in reversed(ranked(records)) if math.isfinite(of.value)]
        self._best = best_of(records)
        self._y_axis = Axis.over(self._metric, [record.value for record in self._records])

    def curves(self, curves: Mapping[int, Curve]) -> str:
        """Return the metric of every trial over its steps; stopped ones end early."""
        points = [point for curve in curves.values() for point in curve]
        if not points:
            return ""
        x_axis = Axis("step", 0, max(step for step, _ in points))
        y_axis = Axis.over(self._metric, [value for _, value in points])
        marks = _frame(x_axis, y_axis, _WIDE)
        for record in self._records:
            places = [(x_axis.place(x), y_axis.place(y)) for x, y in curves.get(record.number, ())]
            marks.append(self._line(places, _WIDE, record))
        return _svg(_WIDE, f"{self._metric} over steps", marks)

    def parallel(self) -> str:
        """Return parallel coordinates: a line for each trial, through its values to its metric."""
        if not self._records:
            return ""
        space, names = self._sweep.space, short_names(self._sweep)
        axes = {key: Axis.of(name, space[key]) for key, name in names.items()}
        places = [number / len(axes) for number in range(len(axes) + 1)]
        marks, labels = list[str](), list[str]()
        for place, axis in zip(places, [*axes.values(), self._y_axis], strict=True):
            x = _AXES.x(place)
            marks.append(_rule("axis", x, x, _AXES.y(0), _AXES.y(1)))
            labels += [_text(x - 6, _AXES.y(y) + 4, label, "end") for y, label in axis.ticks()]
            labels.append(_text(x, _AXES.height - 14, axis.name, kind="name"))
        for record in self._records:
            heights = [axis.place(record.choice[key]) for key, axis in axes.items()]
            heights.append(self._y_axis.place(record.value))
            marks.append(self._line([*zip(places, heights, strict=True)], _AXES, record))
        return _svg(_AXES, "the values of every trial, and its metric", [*marks, *labels])

    def slices(self) -> Iterator[str]:
        """Yield a plot of the metric against every key that is searched."""
        for key, name in short_names(self._sweep).items():
            axis = Axis.of(name, self._sweep.space[key])
            marks = _frame(axis, self._y_axis, _SLICE)
            for record in self._records:
                x = _SLICE.x(axis.place(record.choice[key]))
                y = _SLICE.y(self._y_axis.place(record.value))
                place = f'cx="{x:.1f}" cy="{y:.1f}" r="5"'
                marks.append(self._mark("circle", place, record))
            yield _svg(_SLICE, f"{self._metric} against {key}", marks)

    def _line(self, places: Sequence[tuple[float, float]], area: Area, record: Record) -> str:
        points = " ".join(f"{area.x(x):.1f},{area.y(y):.1f}" for x, y in places)
        return self._mark("polyline", f'points="{points}"', record)

    def _mark(self, shape: str, place: str, record: Record) -> str:
        """Return a shape that stands for a trial; its values show while it is pointed at."""
        kind = "best" if self._best and record.number == self._best.number else record.state
        text = (
            f"trial {record.number:03}: {values_text(self._sweep, record.choice)}, "
            f"{self._metric} {shown(record.value)}, {record.used.steps} steps"
        )
        return f'<{shape} class="{kind}" {place}><title>{escape(text)}</title></{shape}>'


def _svg(area: Area, title: str, marks: Sequence[str]) -> str:
    kind = "small" if area is _SLICE else "wide"
    return (
        f'<svg class="{kind}" viewBox="0 0 {area.width} {area.height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(marks)}</svg>'
    )


def _frame(x_axis: Axis, y_axis: Axis, area: Area) -> list[str]:
    """Return grid lines, ticks, and the name of the x axis."""
    marks = []
    for place, label in y_axis.ticks():
        y = area.y(place)
        marks += [
            _rule("grid", area.x(0), area.x(1), y, y),
            _text(area.left - 6, y + 4, label, "end"),
        ]
    for place, label in x_axis.ticks():
        x = area.x(place)
        marks += [_rule("grid", x, x, area.y(0), area.y(1)), _text(x, area.y(0) + 16, label)]
    return [*marks, _text(area.x(0.5), area.height - 7, x_axis.name, kind="name")]


def _rule(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, label: str, anchor: str = "middle", kind: str = "tick") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(label)}</text>'
