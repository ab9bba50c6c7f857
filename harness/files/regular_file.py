"""Reads untrusted files: only regular files of bounded size and depth."""

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path

from harness.errors import Unusable


def open_regular(path: Path, links: bool = False) -> BufferedReader:
    """Open a regular file for reading, or with `links` also a link to one.

    Never blocks, unlike opening a pipe. Raises Unusable for anything but a file, and OSError.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unusable(f"{path} is a link, not a file") from None
        if error.errno == errno.ENXIO:  # a socket
            raise Unusable(f"{path} is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unusable(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most_bytes: int, links: bool = False) -> bytes:
    """Return the content of a regular file. Raises Unusable beyond `most_bytes`, and OSError."""
    with open_regular(path, links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise Unusable(f"{path} has {size} bytes, more than the {most_bytes} allowed")
        return file.read(most_bytes)


def read_json(path: Path, most_bytes: int, links: bool = False) -> object:
    """Return the JSON value in a regular file. Raises Unusable if it is not JSON, and OSError."""
    data = read_regular(path, most_bytes, links)
    try:
        value: object = json.loads(data)
    except RecursionError:
        raise Unusable(f"{path} cannot be read: it is nested too deeply") from None
    except ValueError as error:
        raise Unusable(f"{path} cannot be read: {error}") from None
    return value
