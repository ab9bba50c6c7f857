"""A cache of folders that processes on several nodes share; each folder is built once.

Renaming a finished folder is atomic, which alone makes the cache correct; the lock only saves work.
Without locks in the file system a folder may be built twice. A killed builder blocks nobody: the
kernel drops its lock, and the next builder on its machine removes the unfinished folder.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness.errors import ConfigError, NoRoom, Unusable, is_full_disk
from harness.files.paths import user_path
from harness.files.regular_file import open_regular, read_json

Report = Callable[[str], None]
Value = TypeVar("Value")
_MOST_JSON_BYTES = 1 << 24


def default_cache() -> Path:
    """Return $XDG_CACHE_HOME/harness, or ~/.cache/harness."""
    cache = os.environ.get("XDG_CACHE_HOME") or user_path("data.cache_dir", "~/.cache")
    return Path(cache) / "harness"


def cache_key(**parts: Any) -> str:
    """Return 16 hex digits that identify a folder's input."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def build_once(folder: Path, build: Callable[[Path], None], report: Report) -> Path:
    """Return `folder` after one process has filled it with `build(path)`.

    `build` writes to a private folder, which is renamed when it returns. If it raises, nothing is
    left and the next waiting process tries again. Raises ConfigError if the cache cannot be
    written: NoRoom if its disk is full or read-only.
    """
    try:
        fill_once(folder, build, report)
    except OSError as error:
        problem = (
            f"data.cache_dir: cannot use {folder.parent}: {error}; set it to a writable folder "
            "with free space"
        )
        raise (NoRoom if is_full_disk(error) else ConfigError)(problem) from error
    return folder


def fill_once(folder: Path, build: Callable[[Path], None], report: Report) -> None:
    """Fill a folder as build_once does. Raises OSError."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock"), report) as is_alone:
        if not folder.is_dir():
            _build(folder, build, is_alone)


@contextlib.contextmanager
def locked(path: Path, report: Report) -> Iterator[bool]:
    """Wait for a lock and hold it; yield False if the file system has none. Raises OSError."""

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK, 0o666)  # raises instead of waiting for a pipe

    with open(path, "a", opener=at_once) as lock:
        yield _acquire(lock, report)


def cached_json(path: Path, parse: Callable[[Any], Value]) -> Value:
    """Return what `parse` makes of a JSON file in a finished folder.

    Raises ConfigError if the file is damaged.
    """
    try:
        return parse(read_json(path, _MOST_JSON_BYTES, links=True))
    except (OSError, Unusable, LookupError, AttributeError, TypeError, ValueError) as error:
        raise damaged(path, error) from error


def cached_array(path: Path, dtype: np.dtype[Any], rows: int | None = None) -> NDArray[Any]:
    """Return a memory-mapped array from a finished folder: one-dimensional, or with `rows` rows.

    Raises ConfigError if the file is damaged.
    """
    try:
        open_regular(path, links=True).close()  # numpy would block on a pipe
        mapped = np.load(path, mmap_mode="r")
        mapped.base.madvise(mmap.MADV_RANDOM)  # a search reads few pages: no read-ahead
        array = np.asarray(mapped)
    except Exception as error:  # numpy raises many classes for damaged files
        raise damaged(path, error) from error
    if array.dtype != dtype or array.shape[:-1] != (() if rows is None else (rows,)):
        raise damaged(path, f"it holds {array.shape} {array.dtype}")
    return array


def release(array: NDArray[Any]) -> None:
    """Unmap the pages of a cached_array from this process; the page cache may keep them."""
    if (mapped := _map_of(array)) is not None:
        mapped.madvise(mmap.MADV_DONTNEED)


def fetch(array: NDArray[Any], places: NDArray[np.int64]) -> None:
    """Prefetch the pages of some indices together; page faults would read them one by one."""
    if (mapped := _map_of(array)) is None:
        return
    begin = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    pages = (begin + places * array.itemsize) // mmap.PAGESIZE
    for page in sorted({*pages.tolist()}):
        mapped.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, mmap.PAGESIZE)


def _map_of(array: NDArray[Any]) -> mmap.mmap | None:
    """Return the memory map behind an array, or None for an array in memory."""
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.base
    return base


def damaged(path: Path, problem: object) -> ConfigError:
    """Return the error for an unreadable file in a finished folder."""
    return ConfigError(
        f"data.cache_dir: {path} cannot be read ({problem}): remove {path.parent}, which will then "
        "be rebuilt"
    )


def _acquire(lock: TextIO, report: Report) -> bool:
    """Wait for the lock, which closing the file releases. Return False if locks are unsupported."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report(f"waiting for the process that holds {lock.name}")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _build(folder: Path, build: Callable[[Path], None], is_alone: bool) -> None:
    ours = f"{folder.name}.partial-{socket.gethostname()}"
    if is_alone:  # a lock works at least between the processes of one machine
        for abandoned in folder.parent.glob(f"{ours}-*"):
            if abandoned.name.removeprefix(f"{ours}-").isdigit():  # "host-*" matches host-a's, too
                shutil.rmtree(abandoned, ignore_errors=True)
    partial = folder.with_name(f"{ours}-{os.getpid()}")
    partial.mkdir()
    try:
        build(partial)
        for file in partial.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())  # a finished folder is intact even after a crash
        partial.rename(folder)
    except OSError:
        # Without locks another process may have finished first, with the same result.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
