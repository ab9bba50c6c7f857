"""Counts of row content that is not read or not trained on, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

Kind = Literal["columns", "keys", "turns", "variables"]
Note = tuple[Kind, str]
"""A kind, and a name: of a column, of a key of turns, of a group of turns, or of a variable that
the chat template reads and that has no value."""
_SHOWN, _MOST = 12, 1000
_OTHERS = "others"
_LONGEST = 60


class Notes(Counter[Note]):
    """Counts of notes, for at most a thousand names: every row may have different columns."""

    def add(self, notes: Iterable[Note]) -> None:
        """Add notes, or counts of notes."""
        counts = notes if isinstance(notes, Mapping) else Counter(notes)
        for (kind, name), count in counts.items():
            note = kind, name if kind == "turns" else _printable(name)
            if note not in self and len(self) >= _MOST:
                note = kind, _OTHERS
            self[note] += count

    def text(self) -> str:
        """Return what is left out, one clause per kind; "" if nothing is."""
        columns, keys, turns = self._of("columns"), self._of("keys"), self._of("turns")
        parts = [f"{count:,} {name}" for name, count in turns.items()]
        if keys:
            parts.insert(0, f"keys of turns {_listed(keys)}")
        if columns:
            parts.insert(0, f"columns {_listed(columns)}")
        return ", ".join(parts)

    def unset(self) -> str:
        """Return which variables of the chat template have no value; "" if all do."""
        names = self._of("variables")
        text = f"the chat template also reads {_listed(names)}: not given (data.template_values)"
        return text if names else ""

    def _of(self, kind: Kind) -> dict[str, int]:
        return {name: count for (noted, name), count in sorted(self.items()) if noted == kind}

    def as_json(self) -> dict[str, int]:
        """Return plain values for from_json."""
        return {f"{kind} {name}": count for (kind, name), count in sorted(self.items())}

    @classmethod
    def from_json(cls, values: Mapping[str, int]) -> Notes:
        """Return the notes that as_json wrote. Raises ValueError for anything else."""
        notes = cls()
        for key, count in values.items():
            kind, _, name = key.partition(" ")
            if kind not in get_args(Kind) or not isinstance(count, int):
                raise ValueError(f"{key!r}: {count!r} is not a note with its count")
            notes[kind, name] += count  # type: ignore[index]
        return notes


def _printable(name: str) -> str:
    """Return a name that fits on a line; a column's name may be any text of any length."""
    shown = name if name.isprintable() else ascii(name)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."


def _listed(counts: Mapping[str, int]) -> str:
    shown = [f"{name} ({count:,})" for name, count in [*counts.items()][:_SHOWN]]
    more = len(counts) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])])
