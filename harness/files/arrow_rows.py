"""Rows of Parquet and Arrow files, and compressed text, read with pyarrow."""

import gzip
import io
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from harness.files.data_format import BadLines

DAMAGED = (EOFError, zlib.error, OSError)
"""Exceptions that reading a damaged or truncated file raises."""


def why_no_pyarrow() -> str:
    """Return an install hint that completes a sentence about a file; "" if pyarrow is installed."""
    if find_spec("pyarrow") is not None:
        return ""
    return 'needs pyarrow, which is not installed: pip install "pyarrow>=17"'


def open_bytes(file: Path) -> IO[bytes]:
    """Open the content of any file, decompressed if it is compressed. Raises OSError."""
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(file))
    if suffix == ".zst":
        import pyarrow

        stream = pyarrow.input_stream(str(file), compression="zstd")
        return io.BufferedReader(stream, 1 << 20)
    return file.open("rb")


_ROWS_AT_ONCE = 1024


def _is_parquet(file: Path) -> bool:
    """Return True for Parquet under any name, also if its first bytes are damaged."""
    with file.open("rb") as opened:
        return file.suffix.lower() == ".parquet" or opened.read(4) == b"PAR1"


def batches_of(file: Path, groups: Sequence[int] | None = None) -> Iterator[Any]:
    """Yield the record batches of a Parquet file, or of row `groups` of it, or of an Arrow stream
    or file. Raises OSError or pyarrow.ArrowInvalid, a ValueError.
    """
    import pyarrow
    from pyarrow import parquet

    if _is_parquet(file):
        with parquet.ParquetFile(file) as table:
            yield from table.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups)
        return
    with pyarrow.OSFile(str(file)) as source:
        if source.read(6) == b"ARROW1":
            opened = pyarrow.ipc.open_file(source)
            yield from (opened.get_batch(n) for n in range(opened.num_record_batches))
            return
        source.seek(0)
        yield from pyarrow.ipc.open_stream(source)


def unreadable() -> tuple[type[Exception], ...]:
    """Return what pyarrow raises for damaged files and for values that Python cannot hold."""
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError, OverflowError)


def records_of(
    file: Path, bad_lines: BadLines, groups: Sequence[int] | None = None, rows_before: int = 0
) -> Iterator[tuple[int, object]]:
    """Yield (row, record), from row 1. If a file is damaged, `bad_lines` gets a problem that names
    the last readable row.

    `groups`: row groups of a Parquet file to read; `rows_before`: rows in the file before them.
    """
    number = rows_before
    try:
        for batch in batches_of(file, groups):
            for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
                for row in batch.slice(first, _ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield number, row
    except unreadable() as error:
        message = " ".join(str(error).split())
        bad_lines.add(file, f"it is damaged or truncated after row {number}: {message}")


def count_rows(file: Path, most_bytes: int) -> tuple[int, int]:
    """Return the number of readable rows and the bytes left; a Parquet footer has the number."""
    from pyarrow import parquet

    try:
        if _is_parquet(file):
            return int(parquet.read_metadata(file).num_rows), most_bytes
    except unreadable():
        return 0, most_bytes
    count = 0
    try:
        for batch in batches_of(file):
            count, most_bytes = count + batch.num_rows, most_bytes - batch.nbytes
            if most_bytes <= 0:
                return count, 0
    except unreadable():
        pass  # reading the rows reports the damage
    return count, most_bytes


Place = tuple[str, ...]  # the keys that lead to an object in a record
_HEAD = 1000  # records that tell where objects are filled up
_MAY_BE_NULL = re.compile(r"'null'|'nullable': True")


def filled_places(records: Iterable[tuple[int, object]]) -> set[Place]:
    """Return where a table, or a file exported from one, fills up objects with nulls: all of them
    have the same keys, one of which has a value in some and null in others.
    """
    shapes = defaultdict[Place, set[tuple[tuple[str, bool], ...]]](set)
    for place, item, _ in _objects([record for _, record in islice(records, _HEAD)]):
        shapes[place].add(tuple((key, item[key] is None) for key in sorted(item)))
    mixed = {place: all_of for place, all_of in shapes.items() if len(all_of) > 1}
    return {
        place for place, all_of in mixed.items() if len({tuple(dict(of)) for of in all_of}) == 1
    }


def remove_nulls(record: object, places: Callable[[], set[Place]]) -> int:
    """Remove the nulls in `places` within the turns and tools of a record; return their number.
    Arguments that a function's schema requires, or that may be null, are kept.
    """
    kept, nulls = set[tuple[str, str]](), list[tuple[dict[str, Any], tuple[str, str]]]()
    for place, item, owner in _objects(record):
        name, schemas = str(owner.get("name")), item.get("properties")
        for key, schema in schemas.items() if isinstance(schemas, dict) else ():
            if f"'{key}'" in str(item.get("required")) or _MAY_BE_NULL.search(str(schema)):
                kept.add((name, key))
        if len(place) > 1 and None in item.values() and place in places():
            nulls += [(item, (name, key)) for key, value in item.items() if value is None]
    removed = [(item, key) for item, (name, key) in nulls if (name, key) not in kept]
    for item, key in removed:
        del item[key]
    return len(removed)


def _objects(record: object) -> Iterator[tuple[Place, dict[str, Any], dict[str, Any]]]:
    """Yield the objects in a record: the place, the object, and the one around it."""
    left: list[tuple[Place, object, dict[str, Any]]] = [((), record, {})]
    while left:
        place, value, owner = left.pop()
        if isinstance(value, list):
            left += [(place, item, owner) for item in value if isinstance(item, dict | list)]
        elif isinstance(value, dict):
            yield place, value, owner
            left += [((*place, key), item, value) for key, item in value.items()]
