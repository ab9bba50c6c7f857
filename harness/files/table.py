"""Typed access to an untrusted mapping: a JSON object or a dict from a pickle."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from harness.errors import Unusable

_MOST = sys.float_info.max


class Table:
    """A mapping whose values are read by key and type.

    Every method raises Unusable, naming `file`, the key and the value, if there is no value of that
    type.
    """

    def __init__(self, value: object, file: object, key: str = "") -> None:
        self.file, self.key = file, key
        if not isinstance(value, Mapping):
            self.refuse(key, value, "an object {...}")
        self.values: Mapping[object, object] = value

    def as_json(self) -> dict[str, Any]:
        """Return the whole mapping. All keys must be strings."""
        for key in self.values:
            self._text(f"a key of {self.key or 'it'}", key)
        return {str(key): value for key, value in self.values.items()}

    def __contains__(self, key: object) -> bool:
        """Return True if the key is present, even with a null value."""
        return key in self.values

    def has(self, key: object) -> bool:
        """Return True if the key has a value other than null."""
        return self.values.get(key) is not None

    def get(self, key: object) -> object:
        """Return a value of any type."""
        if key not in self.values:
            raise Unusable(f"{self.file} lacks {self.path_of(key)}")
        return self.values[key]

    def table(self, key: object) -> Table:
        """Return a nested object."""
        return Table(self.get(key), self.file, self.path_of(key))

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Yield (key, object) for all keys."""
        for key in self.values:
            if not isinstance(key, str):
                self.refuse(self.key, key, "a name")
            yield key, self.table(key)

    def row(self, key: object) -> list[object]:
        """Return an array."""
        value = self.get(key)
        if not isinstance(value, list | tuple):
            self.refuse(self.path_of(key), value, "an array [...]")
        return list(value)

    def counts(self, key: object) -> tuple[int, ...]:
        """Return an array of integers of 0 or more."""
        return tuple(self._count(self.path_of(key), value) for value in self.row(key))

    def texts(self, key: object) -> tuple[str, ...]:
        """Return an array of strings."""
        return tuple(self._text(self.path_of(key), value) for value in self.row(key))

    def numbers(self, key: object) -> list[float]:
        """Return an array of finite numbers."""
        return [self._number(self.path_of(key), value) for value in self.row(key)]

    def count(self, key: object) -> int:
        """Return an integer of 0 or more."""
        return self._count(self.path_of(key), self.get(key))

    def text(self, key: object) -> str:
        """Return a string."""
        return self._text(self.path_of(key), self.get(key))

    def number(self, key: object) -> float:
        """Return a finite number."""
        return self._number(self.path_of(key), self.get(key))

    def loss(self, key: object) -> float | None:
        """Return a number that may be non-finite, or None for null."""
        value = self.get(key)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return value
        return float(self._number(self.path_of(key), value))

    def all_numbers(self, key: object) -> None:
        """Require an object that contains only finite numbers."""
        table = self.table(key)
        for name in table.values:
            table.number(name)

    def refuse(self, key: str, value: object, expected: str) -> NoReturn:
        """Raise Unusable for a value that does not have the expected type."""
        raise Unusable(f"{self.file}: {key or 'it'} is {_short(value)}, not {expected}")

    def path_of(self, key: object) -> str:
        """Return the dotted path of a key: `state.step`."""
        return f"{self.key}.{key}" if self.key else str(key)

    def _count(self, key: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            self.refuse(key, value, "a count")
        return value

    def _text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            self.refuse(key, value, "a string")
        return value

    def _number(self, key: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(key, value, "a finite number")
        if not -_MOST <= value <= _MOST:  # also rejects nan
            self.refuse(key, value, "a finite number")
        return value


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (RuntimeError, ValueError):  # too deeply nested, or an integer of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
