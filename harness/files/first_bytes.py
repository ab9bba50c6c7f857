"""The first bytes of a file: whether it is text, how it begins, and advice if it cannot be read."""

import codecs
import tomllib
from pathlib import Path

from harness.errors import Unusable

NO_UTF_8 = "is not UTF-8 text (to convert Latin-1: iconv -f LATIN1 -t UTF-8 FILE > NEW)"
_KINDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["kinds"]
BY_SUFFIX: dict[str, str] = {
    suffix: kind["advice"] for kind in _KINDS for suffix in kind.get("suffixes", ())
}
"""Advice for files that no format can read, by suffix."""
_BY_MAGIC: list[tuple[bytes, str]] = [
    (bytes.fromhex(magic), kind["advice"]) for kind in _KINDS for magic in kind.get("magic", ())
]


_HEAD_BYTES = 4096
LFS_POINTER = b"version https://git-lfs"
"""First bytes of a git-lfs pointer, which stands in for the actual file."""
GET_LFS = "a git-lfs pointer; run `git lfs pull` in its folder"
_MOST_POINTER_BYTES = 1024  # github.com/git-lfs/git-lfs/blob/main/docs/spec.md


def is_lfs_pointer(file: Path) -> bool:
    """Return True for a git-lfs pointer. Opens only small files."""
    is_small = len(LFS_POINTER) < file.stat().st_size <= _MOST_POINTER_BYTES
    return is_small and _head(file, len(LFS_POINTER)) == LFS_POINTER


def why_not_text(file: Path) -> str:
    """Return advice if the first bytes of a file are not UTF-8, otherwise ""."""
    return "" if _is_text(_head(file)) else why_not_utf_8(file)


def why_not_utf_8(file: Path) -> str:
    """Return advice for an undecodable file, based on its likely kind."""
    head = _head(file)
    return next((advice for magic, advice in _BY_MAGIC if head.startswith(magic)), NO_UTF_8)


def first_line(file: Path, most_bytes: int = _HEAD_BYTES) -> str:
    """Return the first nonblank line in a file's first bytes. Raises Unusable if not UTF-8."""
    head = _head(file, most_bytes)
    if not _is_text(head):
        raise Unusable(f"cannot read {file}: it {why_not_utf_8(file)}")
    lines = head.decode("utf-8-sig", errors="ignore").split("\n")  # the last one may be cut
    return next((line.strip() for line in lines if line.strip()), "")


def count_lines(file: Path, most_bytes: int) -> tuple[int, int]:
    """Return the number of nonblank lines in a file's first `most_bytes`, and the bytes left."""
    count = 0
    with file.open("rb") as lines:
        while most_bytes and (line := lines.readline(most_bytes)):
            most_bytes -= len(line)
            count += bool(line.strip())
    return count, most_bytes


def _head(file: Path, most_bytes: int = _HEAD_BYTES) -> bytes:
    with file.open("rb") as opened:
        return opened.read(most_bytes)


def _is_text(head: bytes) -> bool:
    """Return True if the first bytes of a file are UTF-8; the last character may be cut off."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head
