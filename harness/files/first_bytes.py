"""The first bytes of a file: whether it is text, how it begins, and advice if it cannot be read."""

import codecs
from pathlib import Path

from harness.errors import Unusable

NO_UTF_8 = "is not UTF-8 text (to convert Latin-1: iconv -f LATIN1 -t UTF-8 FILE > NEW)"
_ARRAY = "is an array: write token ids as a .bin/.idx pair (Megatron-LM's format)"
_DOCUMENT = "is a document with markup: extract its text to a .txt file"
_SPREADSHEET = (
    'is a table: convert it to .jsonl, each line {"text": ...} or {"messages": ...}, as with '
    "pandas.read_excel(FILE)[[COLUMN]].rename(columns={COLUMN: 'text'}).to_json(NEW, "
    "orient='records', lines=True)"
)
_UTF_16 = "is UTF-16: iconv -f UTF-16 -t UTF-8 FILE > NEW"


def _compressed(command: str) -> str:
    return f"is compressed: {command} FILE, and name the result"


BY_SUFFIX = {
    ".psv": "is a table: data.format=csv reads it",
    **dict.fromkeys((".xls", ".xlsx", ".ods"), _SPREADSHEET),
    **dict.fromkeys((".gz", ".tgz"), _compressed("gunzip -k")),
    **dict.fromkeys((".zst", ".zstd"), _compressed("zstd -d")),
    ".bz2": _compressed("bunzip2 -k"),
    ".xz": _compressed("unxz -k"),
    ".lz4": _compressed("lz4 -d"),
    **dict.fromkeys((".zip", ".7z", ".tar"), "is an archive: unpack it, and name its folder"),
    **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".h5", ".hdf5"), _ARRAY),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".ipynb"), _DOCUMENT),
}
"""Advice for files that no format can read, by suffix."""
_BY_MAGIC = (
    (b"\x1f\x8b", BY_SUFFIX[".gz"]),
    (b"\x28\xb5\x2f\xfd", BY_SUFFIX[".zst"]),
    (b"BZh", BY_SUFFIX[".bz2"]),
    (b"\xfd7zXZ\x00", BY_SUFFIX[".xz"]),
    (b"PK\x03\x04", BY_SUFFIX[".zip"]),
    (b"PAR1", "is a table in Parquet: data.format=parquet reads it"),
    (b"ARROW1", "is a table in Arrow: data.format=arrow reads it"),
    (b"%PDF-", _DOCUMENT),
    (b"\x93NUMPY", _ARRAY),
    (codecs.BOM_UTF16_LE, _UTF_16),
    (codecs.BOM_UTF16_BE, _UTF_16),
)


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
