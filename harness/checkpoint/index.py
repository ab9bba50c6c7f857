"""index.json: which file of a checkpoint contains which elements of which parameter."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from harness.errors import Unusable
from harness.files.table import Table
from harness.layout.box import Part, Piece, Range, describe, uncovered

WEIGHT = "weight"
BUFFER = "buffer"
INDEX = "index.json"


@dataclass(frozen=True)
class Entry:
    """The location of a saved fragment: its tensors are `key(kind)` in `file`."""

    name: str
    part: Part
    offset: int
    numel: int
    kinds: tuple[str, ...]
    file: str

    @property
    def piece(self) -> Piece:
        """The elements of the parameter that it contains."""
        return Piece(self.part, self.offset, self.numel)

    def key(self, kind: str) -> str:
        """Return the name of one of its tensors in the file."""
        return f"{self.name}@{self.offset}/{kind}"


def to_index(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return entries as JSON, grouped by parameter to keep it small with thousands of ranks.

    A fragment is [offset, elements, file]; for a sliced parameter, the slice's index in "parts" is
    appended.
    """
    index: dict[str, Any] = {}
    for entry in entries:
        record = {"shape": entry.part.whole, "kinds": entry.kinds, "at": []}
        record = index.setdefault(entry.name, record)
        place: tuple[object, ...] = (entry.offset, entry.numel, entry.file)
        if not entry.part.is_whole:
            parts = record.setdefault("parts", [])
            if entry.part.ranges not in parts:
                parts.append(entry.part.ranges)
            place += (parts.index(entry.part.ranges),)
        record["at"].append(place)
    return index


def merged(indices: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the combined index of all ranks. A buffer saved by several pipeline stages appears
    once.

    Raises Unusable if two ranks saved the same elements of a weight, or elements are missing.
    """
    whole: dict[str, Any] = {}
    pieces: dict[str, dict[tuple[int, ...], tuple[int, str]]] = {}
    for index in indices:
        for name, record in index.items():
            entry = whole.setdefault(name, {"shape": record["shape"], "kinds": record["kinds"]})
            if entry["shape"] != record["shape"]:
                raise Unusable(
                    f"{name} has shape {entry['shape']} on one rank, {record['shape']} on another"
                )
            is_buffer, parts = BUFFER in record["kinds"], entry.setdefault("parts", [])
            places = pieces.setdefault(name, {})
            for offset, numel, file, *number in record["at"]:
                part = number and record["parts"][number[0]]
                if part and part not in parts:
                    parts.append(part)
                place = (offset, parts.index(part)) if part else (offset,)
                first = places.setdefault(place, (numel, file))
                if first != (numel, file) and not (is_buffer and first[0] == numel):
                    raise Unusable(f"{first[1]} and {file} both hold {name} from {offset} on")
    for name, record in whole.items():
        if not record["parts"]:
            del record["parts"]
        record["at"] = [(at[0], *piece, *at[1:]) for at, piece in pieces[name].items()]
        saved, numel = sum(numel for numel, _ in pieces[name].values()), math.prod(record["shape"])
        if saved != numel:
            raise Unusable(f"the ranks saved {saved} elements of {name}, which has {numel}")
    return whole


class Index:
    """An index that creates entries only for the parameters that a rank reads: a checkpoint of a
    thousand ranks has a thousand times as many entries.

    Raises Unusable if `index`, read from `place`, is not an object of objects.
    """

    def __init__(self, index: object, place: object = INDEX) -> None:
        self._parameters, self._place = dict(Table(index, place).tables()), place
        self._rows: dict[str, list[Any]] = {}

    def check(self) -> set[str]:
        """Return the names of all files. Raises Unusable unless the fragments cover each element of
        every parameter exactly once.
        """
        files = set[str]()
        for name, record in self._parameters.items():
            parts = _parts(record)
            pieces = [_piece(record, piece, len(parts)) for piece in record.row("at")]
            record.texts("kinds")  # only checks that they exist
            for number, part in enumerate(parts):
                own = [(offset, numel) for offset, numel, _, n in pieces if n == number]
                title = f"{name} {describe(part) if 'parts' in record else list(part.whole)}"
                _check_part(title, part, own, self._place)
            if problem := uncovered(parts):
                raise Unusable(f"{self._place}: {name}: {problem}")
            files |= {file for _, _, file, _ in pieces}
        return files

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all parameters."""
        return iter(self._parameters)

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return the kinds of a parameter's tensors; empty if it was not saved."""
        return self._parameters[name].texts("kinds") if name in self._parameters else ()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return self._parameters[name].counts("shape")

    def entries(self, name: str, near: Piece | None = None) -> list[Entry]:
        """Return the entries of a parameter; with `near`, at least those that overlap it."""
        if name not in self._parameters:
            return []
        record = self._parameters[name]
        kinds, parts = record.texts("kinds"), _parts(record)
        rows = self._sorted(name)
        if near is not None and near.part == parts[0] and "parts" not in record:
            end = near.offset + near.numel
            first = bisect_right(rows, near.offset, key=itemgetter(0)) - 1
            rows = rows[max(first, 0) : bisect_left(rows, end, key=itemgetter(0))]
        pieces = [_piece(record, row, len(parts)) for row in rows]
        return [Entry(name, parts[n], at, numel, kinds, file) for at, numel, file, n in pieces]

    def _sorted(self, name: str) -> list[Any]:
        if name not in self._rows:
            self._rows[name] = sorted(self._parameters[name].row("at"), key=itemgetter(0))
        return self._rows[name]


def _check_part(title: str, part: Part, pieces: list[tuple[int, int]], place: object) -> None:
    """Raise Unusable unless the pieces cover each element of a slice exactly once."""
    end = 0
    for offset, numel in sorted(pieces):
        if offset != end or numel < 1:
            raise Unusable(
                f"{place}: a fragment of {title} starts at element {offset} and has {numel}, but "
                f"the previous one ends at {end}"
            )
        end = offset + numel
    if end != part.numel:
        raise Unusable(f"{place}: the fragments of {title} end at element {end}")


def _parts(record: Table) -> list[Part]:
    """Return the slices to which a parameter's fragments refer by index: a single one, the whole
    parameter, if it is not sliced.
    """
    shape = record.counts("shape")
    if "parts" not in record:
        return [Part.of(shape)]
    return [_part(record, part, shape) for part in record.row("parts")]


def _part(record: Table, value: object, shape: tuple[int, ...]) -> Part:
    try:
        return Part(shape, tuple(tuple(_range(edges) for edges in cut) for cut in value))  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise Unusable(
            f"{record.file}: {record.key}.parts has {value!r:.60}, not a slice of {list(shape)}"
        ) from None


def _range(edges: Any) -> Range:
    start, stop = edges
    if type(start) is type(stop) is int:
        return start, stop
    raise TypeError


def _piece(record: Table, piece: object, parts: int) -> tuple[int, int, str, int]:
    """Return (offset, elements, file, slice index) of a fragment, after checking it."""
    if isinstance(piece, list | tuple) and len(piece) == 3 + ("parts" in record):
        offset, numel, file, *part = piece
        number = part[0] if part else 0
        are_counts = type(offset) is type(numel) is type(number) is int
        if are_counts and type(file) is str and 0 <= number < parts:
            return offset, numel, file, number
    raise Unusable(f"{record.file}: {record.key}.at: {piece!r:.60} is not [offset, elements, file]")
