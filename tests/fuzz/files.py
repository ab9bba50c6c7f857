"""Files that are damaged, or no files."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 12345\n"
)


def spoil_bytes(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Damaged bytes, and what was done to them."""
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice((1, 4, 64, 4096)))
    early = draw.randrange(min(len(data), 64) + 1)
    changes: dict[str, Callable[[], bytes]] = {
        "empty": lambda: b"",
        "one byte": lambda: data[:1],
        "cut off": lambda: data[:at],
        "cut off by one": lambda: data[:-1],
        "cut off in its head": lambda: data[:early],
        "one byte more": lambda: data + b"\0",
        "a page more": lambda: data + draw.randbytes(4096),
        "zeros": lambda: data[:at] + bytes(end - at) + data[end:],
        "other bytes": lambda: data[:at] + draw.randbytes(end - at) + data[end:],
        "other bytes in its head": lambda: data[:early] + draw.randbytes(8) + data[early + 8 :],
        "0xff in its head": lambda: data[:early] + b"\xff" * 8 + data[early + 8 :],
        "a part removed": lambda: data[:at] + data[end:],
        "a part doubled": lambda: data[:end] + data[at:],
        "all zeros": lambda: bytes(len(data)),
        "compressed": lambda: gzip.compress(data, 1, mtime=0),
        "a git-lfs pointer": LFS_POINTER.encode,
        "a web page": lambda: b"<!DOCTYPE html><html><body>404</body></html>",
        "a pickle": lambda: b"cposix\nsystem\n(S'touch executed'\ntR.",
    }
    name = draw.choice([*changes])
    return changes[name](), name


def spoil_file(draw: random.Random, path: Path) -> str:
    """Damage a file, or put something else into its place; returns what was done."""
    if draw.randrange(3):
        data, told = spoil_bytes(draw, path.read_bytes())
        path.write_bytes(data)
    else:
        told = replace_file(draw, path)
    return f"{path.name}: {told}"


def replace_file(draw: random.Random, path: Path) -> str:
    """Something that is no regular file, at the path of one; returns what it is."""
    told = draw.choice([*_REPLACEMENTS])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    _REPLACEMENTS[told](path)
    return told


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        try:  # the path of a socket may have 107 characters
            listener.bind(os.path.relpath(path, before))
        except OSError:
            path.mkdir()


_REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/null": lambda path: path.symlink_to("/dev/null"),
    "a link to its folder": lambda path: path.symlink_to("."),
    "a socket": _socket,
}
