"""CSV and TSV: the first row names the columns, every other row is a record."""

import csv
import io
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from harness.files.data_format import BadLines, DataFormat
from harness.files.first_bytes import count_lines, why_not_utf_8

_MOST_FIELD_CHARS = 1 << 30
_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
_LOOKED_AT_CHARS, _LOOKED_AT_ROWS = 1 << 16, 50
_NAMED = re.compile(r"sep=(.)\r?\n?")  # a line before the first row, as spreadsheets write it


def _usual(file: Path) -> str:
    return "\t" if file.suffix.lower() == ".tsv" else ","


def _separator(file: Path) -> tuple[str, bool]:
    """Return the column separator, and True if a separate first line names it. Otherwise it is the
    one that splits the first row and most others into the same number of columns, or else the usual
    one for the file's suffix.
    """
    usual = _usual(file)
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as opened:
        first = opened.readline(_LOOKED_AT_CHARS)
        if named := _NAMED.fullmatch(first):
            return named[1], True
        head = first + opened.read(_LOOKED_AT_CHARS)
        is_cut = bool(opened.read(1))
    dividing = [
        (agreeing, columns, separator == usual, separator)
        for separator in _SEPARATORS
        for columns, agreeing in [_divided(head, separator, is_cut)]
        if columns > 1 and agreeing >= 0.5
    ]
    return max(dividing)[-1] if dividing else usual, False


def _divided(head: str, separator: str, is_cut: bool) -> tuple[int, float]:
    """Return the first row's number of columns, and the share of the next rows that match it."""
    rows = csv.reader(io.StringIO(head, newline=""), delimiter=separator)
    try:
        first, *others = islice(filter(None, rows), _LOOKED_AT_ROWS)
    except (csv.Error, ValueError):
        return 0, 0.0
    if is_cut and len(others) < _LOOKED_AT_ROWS - 1:
        del others[-1:]
    agreeing = sum(len(row) == len(first) for row in others)
    return len(first), agreeing / len(others) if others else 1.0


def _note(file: Path) -> str:
    separator, _ = _separator(file)
    if separator == _usual(file):
        return ""
    return f"columns separated by {_SEPARATORS.get(separator, repr(separator))}"


def _records(file: Path, bad_lines: BadLines) -> Iterator[tuple[int, object]]:
    rows = _rows(file, bad_lines)
    _, names = next(rows, (0, []))
    if _is_no_utf_8(names):
        return bad_lines.add(file, f"it {why_not_utf_8(file)}")
    repeated = next((name for name in names if name and names.count(name) > 1), None)
    if repeated is not None:
        return bad_lines.add(file, f"its first row names {repeated!r} twice: rename one of them")
    for line, row in rows:
        problem = ""
        if len(row) != len(names):
            problem = f"has {len(row)} columns, but the first row names {len(names)}"
        if _is_no_utf_8(row):
            problem = why_not_utf_8(file)
        if not problem:
            yield line, dict(zip(names, row, strict=True))
        elif row:
            bad_lines.seen += 1
            bad_lines.add(file, problem, line)
            if bad_lines.are_enough:
                return None


def _rows(file: Path, bad_lines: BadLines) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, row), with lone surrogates for bytes that are not UTF-8."""
    csv.field_size_limit(_MOST_FIELD_CHARS)
    separator, is_named = _separator(file)
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as opened:
        before = int(is_named and bool(opened.readline()))
        rows = csv.reader(opened, delimiter=separator, strict=True)
        while True:
            begins = rows.line_num + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                if rows.line_num > begins and "end of data" in str(
                    error
                ):  # not a row, but the rest of the file
                    text = (
                        f"it is not valid CSV: nothing closes the quote of line {begins + before}"
                    )
                    return bad_lines.add(file, text)
                lines = rows.line_num - begins + 1  # lines that an open quote has joined
                bad_lines.seen += lines
                bad_lines.add(file, _in_words(error), begins + before, lines)
                if bad_lines.are_enough:
                    return None
                continue
            if row is None:
                return None
            yield begins + before, row


def _in_words(error: csv.Error) -> str:
    is_quote = "expected after" in str(error) or "end of data" in str(error)
    why = "a quote that begins a column is not closed at its end: " if is_quote else ""
    return f"is not valid CSV: {why}{error}"


def _is_no_utf_8(row: list[str]) -> bool:
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return True
    return False


def _count(file: Path, most_bytes: int) -> tuple[int, int]:
    """Return a row count, too high if texts contain line breaks, and the bytes left."""
    count, left = count_lines(file, most_bytes)
    return max(0, count - 1), left


FORMAT = DataFormat(
    name="csv", suffixes=frozenset({".csv", ".tsv"}), records=_records, count=_count, note=_note
)
