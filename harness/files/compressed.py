"""Files whose name ends in .gz or .zst, read as what they hold; pyarrow, where it is needed."""

from __future__ import annotations

import gzip
import io
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import IO, cast

DAMAGED = (EOFError, zlib.error, OSError)
"""What reading a damaged or truncated file raises."""


def why_no_pyarrow() -> str:
    """Return what to install, to end a sentence about a file; "" if it is there."""
    if find_spec("pyarrow") is not None:
        return ""
    return 'is read by pyarrow, which is not installed: pip install "pyarrow>=17"'


def open_bytes(file: Path) -> IO[bytes]:
    """Open what a file holds, decompressed. Raises OSError."""
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(file))
    if suffix == ".zst":
        import pyarrow

        stream = pyarrow.input_stream(str(file), compression="zstd")
        return io.BufferedReader(stream, 1 << 20)
    return file.open("rb")


def compressed(file: Path, content: bytes) -> bytes:
    """Return the content of a copy of a file with the same name."""
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return gzip.compress(content, mtime=0)
    if suffix == ".zst":
        import pyarrow

        return bytes(pyarrow.Codec("zstd").compress(content))
    return content
