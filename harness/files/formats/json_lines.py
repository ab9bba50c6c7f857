"""JSON: one record per line, or the elements of an array; also compressed (.gz, .zst)."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from harness.errors import Unusable
from harness.files.arrow_rows import DAMAGED, open_bytes, why_no_pyarrow
from harness.files.data_format import BadLines, DataFormat, problem_of
from harness.files.first_bytes import NO_UTF_8, first_line, why_not_text, why_not_utf_8

_MOST_LINE_BYTES = 1 << 24  # maximum length of a first line that is tested for JSON
_HEAD_BYTES, _BLOCK_CHARS, _COUNTED_BYTES = 1 << 16, 1 << 20, 1 << 24
_MOST_CUT = 16  # maximum characters from an error to the end of a cut text: -Infinit, \\ud83
_BETWEEN = re.compile(r"[\s,]*")  # before, between and after the elements of an array
_OTHER_JSON = (
    "is JSON, but neither an array nor one object per line: jq -c . FILE > NEW.jsonl writes its "
    "objects as lines"
)


def _records(file: Path, bad_lines: BadLines) -> Iterator[tuple[int, object]]:
    try:
        yield from _elements(file) if _is_array(file) else _lines(file, bad_lines)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        bad_lines.add(file, f"it is not one complete JSON array: {error}")
    except RecursionError:
        bad_lines.add(file, "it is JSON that is nested too deeply")
    except DAMAGED as error:
        if isinstance(error, OSError) and error.errno:
            raise
        bad_lines.add(file, f"it is damaged or truncated: {error}")


def _lines(
    file: Path, bad_lines: BadLines, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, object]]:
    with open_bytes(file) as opened:
        for number, line in enumerate(_lines_between(opened, start, stop), 1):
            is_first = number == 1 and not start
            text = line.removeprefix(codecs.BOM_UTF8).strip() if is_first else line.strip()
            if not text:
                continue
            try:
                record = json.loads(text.decode())
            except UnicodeDecodeError as error:
                if is_first and (why := why_not_utf_8(file)) != NO_UTF_8:
                    return bad_lines.add(file, f"it {why}")
                problem = problem_of(error)
            except json.JSONDecodeError as error:
                if is_first and text.startswith(b"["):
                    name = re.sub(r"\.(jsonl|ndjson)\b", ".json", file.name)
                    return bad_lines.add(file, f"it is one JSON array: rename it to {name}")
                problem = f"is not valid JSON: {error.msg} at column {error.colno}"
            except RecursionError:
                problem = "is JSON that is nested too deeply"
            except ValueError as error:  # an integer of thousands of digits
                problem = str(error)
            else:
                yield number, record
                continue
            bad_lines.seen += 1
            bad_lines.add(file, problem, number)
            if bad_lines.are_enough:
                return None


def _lines_between(opened: IO[bytes], start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the lines whose first byte is in a range; `start` may be inside a line."""
    if stop is None and not start:
        yield from opened
        return
    at = start
    if start:  # a line that began before `start` belongs to the previous range
        opened.seek(start - 1)
        at = start - 1 + len(opened.readline())
    while (stop is None or at < stop) and (line := opened.readline()):
        at += len(line)
        yield line


def _bounds(file: Path, least_bytes: int) -> list[int]:
    if file.suffix.lower() in (".gz", ".zst") or _is_array(file):
        return []
    num_bytes = file.stat().st_size
    ranges = max(1, num_bytes // least_bytes)
    return [num_bytes * number // ranges for number in range(ranges + 1)]


def _lines_before(file: Path, start: int) -> int:
    lines, last = 0, b"\n"
    with file.open("rb") as opened:
        while start and (block := opened.read(min(start, _COUNTED_BYTES))):
            lines, start, last = lines + block.count(b"\n"), start - len(block), block[-1:]
    return lines + (last != b"\n")  # a line that begins before the range is not part of it


def _is_array(file: Path) -> bool:
    names = [suffix.lower() for suffix in file.suffixes[-2:]]
    if ".json" not in names:
        return False
    with open_bytes(file) as opened:
        head = opened.read(_HEAD_BYTES)
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _elements(file: Path) -> Iterator[tuple[int, object]]:
    """Yield (number, element) of an array, without loading all of it. Raises ValueError."""
    decoder, number, at = json.JSONDecoder(), 0, 0
    with open_bytes(file) as opened:
        text = codecs.getreader("utf-8-sig")(opened)
        unread = text.read(_HEAD_BYTES).lstrip()[1:]  # without the "["
        while True:
            start = _BETWEEN.match(unread, at).end()  # type: ignore[union-attr]
            if unread[start : start + 1] == "]":
                rest = unread[start + 1 :]
                while not rest.strip() and (rest := text.read(_BLOCK_CHARS)):
                    pass
                if rest:
                    raise ValueError(f"more follows the ] after element {number}")
                return
            try:
                element, at = decoder.raw_decode(unread, start)
            except json.JSONDecodeError as error:
                # Reads at least as much again, so that a long element is not reparsed for every
                # block.
                is_cut = error.pos > len(unread) - _MOST_CUT or error.msg.startswith("Unterminated")
                more = text.read(max(_BLOCK_CHARS, len(unread) - start)) if is_cut else ""
                if not more:
                    raise ValueError(f"{error.msg} in element {number + 1}") from None
                unread, at = unread[start:] + more, 0
                continue
            number += 1
            yield number, element


def _count(file: Path, most_bytes: int) -> tuple[int, int]:
    """Return a rough count of the records in the first `most_bytes`, and the bytes left."""
    count = 0
    try:
        if _is_array(file):
            for _, element in _elements(file):
                count, most_bytes = count + 1, max(0, most_bytes - len(str(element)))
                if not most_bytes:
                    break
        else:
            with open_bytes(file) as lines:
                while most_bytes and (line := lines.readline(most_bytes)):
                    most_bytes -= len(line)
                    count += bool(line.strip())
    except (ValueError, RecursionError, *DAMAGED) as error:
        if isinstance(error, OSError) and error.errno:
            raise
    return count, most_bytes


def _why_not(file: Path, is_named: bool) -> str:
    """Return why a file holds no records, or "". Without data.format only a .json is opened."""
    suffix = file.suffix.lower()
    if suffix in (".gz", ".zst"):
        return why_no_pyarrow() if suffix == ".zst" else ""
    if is_named:
        return why_not_text(file)
    if suffix != ".json" or _is_array(file):
        return ""
    try:
        is_object = isinstance(json.loads(first_line(file, _MOST_LINE_BYTES)), dict)
    except (ValueError, RecursionError, Unusable):
        is_object = False
    return why_not_text(file) or ("" if is_object else _OTHER_JSON)


FORMAT = DataFormat(
    name="jsonl",
    suffixes=frozenset(
        f".{name}{ending}" for name in ("jsonl", "ndjson", "json") for ending in ("", ".gz", ".zst")
    ),
    records=_records,
    bounds=_bounds,
    records_between=_lines,
    lines_before=_lines_before,
    count=_count,
    why_not=_why_not,
)
