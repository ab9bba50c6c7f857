"""Parquet; each row is a record."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.files.arrow_rows import count_rows, records_of, unreadable, why_no_pyarrow
from harness.files.data_format import BadLines, DataFormat


def _row_groups(file: Path) -> list[tuple[int, int]]:
    """Return the first byte and the rows of each row group; none if the file is damaged."""
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(file)
    except unreadable():
        return []  # reading the rows reports the damage
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    return [(_first_byte(group), group.num_rows) for group in groups]


def _first_byte(group: Any) -> int:
    columns = [group.column(number) for number in range(group.num_columns)]
    return min(
        (
            column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
            for column in columns
        ),
        default=0,
    )


def _bounds(file: Path, least_bytes: int) -> list[int]:
    """Return the bounds of byte ranges, each of which starts with a row group."""
    num_bytes = file.stat().st_size
    bounds = [0]
    for begin, _ in _row_groups(file):
        if begin >= bounds[-1] + least_bytes and num_bytes >= begin + least_bytes:
            bounds.append(begin)
    return [*bounds, num_bytes]


def _records_between(
    file: Path, bad_lines: BadLines, start: int, stop: int
) -> Iterator[tuple[int, object]]:
    groups = _row_groups(file)
    own = [number for number, (begin, _) in enumerate(groups) if start <= begin < stop]
    before = sum(rows for begin, rows in groups if begin < start)
    return records_of(file, bad_lines, own, before)


FORMAT = DataFormat(
    name="parquet",
    suffixes=frozenset({".parquet"}),
    records=records_of,
    bounds=_bounds,
    records_between=_records_between,
    count=count_rows,
    why_not=lambda file, is_named: why_no_pyarrow(),
)
