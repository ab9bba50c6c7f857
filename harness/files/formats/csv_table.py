"""CSV and TSV: the first row names the columns, each other row is a record."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from harness.files.data_format import BadLines, DataFormat
from harness.files.first_bytes import count_lines

_MOST_FIELD_CHARS = 1 << 30


def _delimiter(file: Path) -> str:
    return "\t" if file.suffix.lower() == ".tsv" else ","


def _records(file: Path, bad_lines: BadLines) -> Iterator[tuple[int, object]]:
    csv.field_size_limit(_MOST_FIELD_CHARS)
    with file.open(encoding="utf-8-sig", newline="") as opened:
        rows = csv.reader(opened, delimiter=_delimiter(file), strict=True)
        begins = 1
        try:
            names = next(rows, [])
            for row in rows:
                begins, line = rows.line_num + 1, begins
                if len(row) == len(names):
                    yield line, dict(zip(names, row, strict=True))
                elif row:
                    text = f"has {len(row)} columns, where the first row names {len(names)}"
                    bad_lines.seen += 1
                    bad_lines.add(file, text, rows.line_num)
        except csv.Error as error:
            bad_lines.add(file, f"is no CSV: {error}", rows.line_num)


def _count(file: Path, most_bytes: int) -> tuple[int, int]:
    """Return the rows, roughly: text with line breaks counts more than once."""
    count, left = count_lines(file, most_bytes)
    return max(0, count - 1), left


def _excerpt(file: Path, most_bytes: int) -> bytes:
    copy = io.StringIO(newline="")
    writer = csv.writer(copy, delimiter=_delimiter(file))
    for number, (_, record) in enumerate(_records(file, BadLines())):
        assert isinstance(record, dict)
        if not number:
            writer.writerow(record)
        writer.writerow(record.values())
        if copy.tell() >= most_bytes:
            break
    return copy.getvalue().encode()


FORMAT = DataFormat(
    name="csv",
    suffixes=frozenset({".csv", ".tsv"}),
    records=_records,
    count=_count,
    excerpt=_excerpt,
)
