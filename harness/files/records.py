"""Records of a run: JSON objects as files or as lines; damaged lines are skipped."""

import contextlib
import io
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.errors import CannotSave, ConfigError, Unusable
from harness.files.regular_file import open_regular, read_json

_MOST_BYTES = 2**28
_LOG = logging.getLogger(__name__)


class Unreadable(ConfigError):
    """A record that is not a JSON object, or not a regular file; the message names the file."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while writing `path` into a CannotSave that names the file."""
    try:
        yield
    except OSError as error:
        raise CannotSave(
            f"{path} cannot be written ({error.strerror or error}): free space, or fix its disk; "
            "the same command then resumes from the newest checkpoint"
        ) from error


def as_line(record: dict[str, Any]) -> str:
    """Return a record as one line of JSON."""
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def as_text(value: dict[str, Any]) -> str:
    """Return a record as the indented JSON of a file."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def is_count(value: Any) -> bool:
    """Return True if a value from a record is an integer of 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None if the file does not exist. Raises Unreadable."""
    try:
        value = read_json(path, _MOST_BYTES, links=True)
    except FileNotFoundError:
        return None
    except (OSError, Unusable) as error:
        raise Unreadable(str(error)) from error
    if not isinstance(value, dict):
        raise Unreadable(f"{path} is damaged: it holds {type(value).__name__}, not an object")
    return value


def read_lines(path: Path, needed: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a .jsonl file that are objects with the key `needed`.

    Text after the last newline is still being written and is ignored. Damaged lines are skipped
    with a warning. Raises Unreadable if `path` is not a regular file.
    """
    if (opened := _opened(path)) is None:
        return
    with io.TextIOWrapper(opened, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                return
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict) and needed in line:
                yield line
            else:
                _LOG.warning("%s: line %d is damaged and left out", path, number)


def require_file(path: Path) -> None:
    """Raise Unreadable if `path` exists but is not a regular file."""
    if (opened := _opened(path)) is not None:
        opened.close()


def _opened(path: Path) -> io.BufferedReader | None:
    try:
        return open_regular(path, links=True)
    except FileNotFoundError:
        return None
    except (OSError, Unusable) as error:
        raise Unreadable(str(error)) from error


def _finite(value: Any) -> Any:
    """Return a copy with non-finite floats as "nan", "inf", "-inf": visible, and valid JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
