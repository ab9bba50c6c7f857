"""The values that a sweep tries: lists and ranges, by key. Standard library only."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from harness.config.assignments import did_you_mean, parse_value, value_as_text

_DIGITS = 4  # of a number that is not whole: enough to tell trials apart, and readable


@dataclass(frozen=True)
class Values:
    """A list of values."""

    values: tuple[str, ...]  # as they are written on the command line

    def grid(self) -> list[str]:
        """Return every value."""
        return [*self.values]

    def draw(self, random_: random.Random) -> str:
        """Return one of the values."""
        return random_.choice(self.values)

    @property
    def extremes(self) -> tuple[str, ...]:
        """The values whose plans show every problem of the list."""
        return self.values


@dataclass(frozen=True)
class Range:
    """Numbers from one to another; only integers if both ends are integers."""

    from_: float
    to: float
    log: bool = False  # evenly spaced in the logarithm
    points: int | None = None  # number of grid points, including both ends

    @property
    def is_whole(self) -> bool:
        """True if only whole numbers are tried."""
        return isinstance(self.from_, int) and isinstance(self.to, int)

    def grid(self) -> list[str]:
        """Return `points` evenly spaced numbers."""
        last = max(1, (self.points or 1) - 1)
        return [*dict.fromkeys(self._at(number / last) for number in range(self.points or 1))]

    def draw(self, random_: random.Random) -> str:
        """Return a random number."""
        return self._at(random_.random())

    def text(self, number: float) -> str:
        """Return a number as it is written on the command line, within the range."""
        if self.is_whole:
            return str(round(number))
        rounded = float(f"{number:.{_DIGITS}g}")
        return repr(min(max(rounded, float(self.from_)), float(self.to)))

    @property
    def extremes(self) -> tuple[str, ...]:
        """Both ends."""
        return self.text(self.from_), self.text(self.to)

    def _at(self, share: float) -> str:
        if self.log:
            return self.text(self.from_ * (self.to / self.from_) ** share)
        return self.text(self.from_ + (self.to - self.from_) * share)


Dimension = Values | Range
Space = Mapping[str, Dimension]
Choice = dict[str, str]  # a value for every key, as text


def read_space(tree: Any, grid: bool, origin: str, problems: list[str]) -> dict[str, Dimension]:
    """Return the dimensions of a [search] table; append its problems to `problems`."""
    space: dict[str, Dimension] = {}
    if not isinstance(tree, dict) or not tree:
        problems.append(
            f"[search] ({origin}) has no keys: add one, such as optim.lr = [1e-3, 3e-3]"
        )
        return space
    for key, value in _leaves(tree):
        where = f"search.{key} is {str(value)[:80]} ({origin})"
        dimension = _range(value) if isinstance(value, dict) else None
        if isinstance(value, list) and value:
            space[key] = Values(tuple(dict.fromkeys(map(_word, value))))
        elif isinstance(dimension, str):
            problems.append(f"{where}: {dimension}")
        elif dimension is None:
            problems.append(
                f"{where}: it must be a list of values, or a range such as "
                "{from = 1e-4, to = 1e-2, log = true}"
            )
        elif grid and dimension.points is None:
            problems.append(f"{where}: a grid needs a number of points, such as points = 5")
        else:
            space[key] = dimension
    return space


def grid(space: Space) -> Iterator[Choice]:
    """Yield every combination, the last key fastest."""
    for values in itertools.product(*(dimension.grid() for dimension in space.values())):
        yield dict(zip(space, values, strict=True))


def draws(space: Space, number: int, seed: int) -> Iterator[Choice]:
    """Yield random combinations; a larger `number` only continues the same sequence."""
    random_ = random.Random(seed)
    for _ in range(number):
        yield {key: dimension.draw(random_) for key, dimension in space.items()}


def corners(space: Space) -> Iterator[Choice]:
    """Yield combinations in which every end and every value occurs at least once."""
    ends = [dimension.extremes for dimension in space.values()]
    for number in range(max(map(len, ends), default=1)):
        yield {
            key: values[min(number, len(values) - 1)]
            for key, values in zip(space, ends, strict=True)
        }


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their lists or ranges, or whatever stands in their place."""
    for name, value in tree.items():
        if isinstance(value, dict) and value and not {"from", "to"} & value.keys():
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _range(table: dict[str, Any]) -> Range | str:
    """Return the range that a table describes, or its problem as text."""
    names = [field.name.rstrip("_") for field in fields(Range)]
    for name in table:
        if name not in names:
            return f"{name} is not a key of a range{did_you_mean(name, names)}"
    low, high, log = table.get("from"), table.get("to"), table.get("log", False)
    points = table.get("points")
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, int | float) or not math.isfinite(end):
            return "from and to must be numbers"
    assert low is not None
    assert high is not None
    if not low < high:
        return "from must be less than to"
    if not isinstance(log, bool):
        return "log must be true or false"
    if log and low <= 0:
        return "log needs a range above 0"
    if points is not None and (isinstance(points, bool) or not isinstance(points, int)):
        return "points must be an integer"
    if points is not None and not 2 <= points <= 10_000:
        return "points must be from 2 to 10,000"
    return Range(low, high, log, points)


def _word(value: Any) -> str:
    """Return a value as a user would type it: without quotes where none are needed."""
    if isinstance(value, str) and parse_value(value) == value and value:
        return value
    return value_as_text(value)
