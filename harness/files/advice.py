"""Advice on files that are not read: by suffix, by first bytes."""

from __future__ import annotations

import codecs

LINES_WANTED = '{"text": ...} or {"messages": ...}'
NO_UTF_8 = "is no UTF-8 text (of Latin-1, iconv -f LATIN1 -t UTF-8 FILE > NEW makes it)"
_ARRAY = "is an array: write token ids as a .bin/.idx pair (Megatron-LM's format)"
_DOCUMENT = "is a document with markup of its own: extract its text into .txt"
_UTF_16 = "is UTF-16: iconv -f UTF-16 -t UTF-8 FILE > NEW"


def _compressed(command: str) -> str:
    return f"is compressed: {command} FILE, and name what comes out"


def _table(reader: str) -> str:
    return (
        f"is a table: write a .jsonl, each line {LINES_WANTED}, as with pandas.{reader}(FILE)"
        "[[COLUMN]].rename(columns={COLUMN: 'text'}).to_json(NEW, orient='records', lines=True)"
    )


BY_SUFFIX = {
    ".psv": "is a table: data.format=csv reads it",
    **dict.fromkeys((".xls", ".xlsx", ".ods"), _table("read_excel")),
    **dict.fromkeys((".gz", ".tgz"), _compressed("gunzip -k")),
    **dict.fromkeys((".zst", ".zstd"), _compressed("zstd -d")),
    ".bz2": _compressed("bunzip2 -k"),
    ".xz": _compressed("unxz -k"),
    ".lz4": _compressed("lz4 -d"),
    **dict.fromkeys((".zip", ".7z", ".tar"), "is an archive: unpack it, and name its folder"),
    **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".h5", ".hdf5"), _ARRAY),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".ipynb"), _DOCUMENT),
}
"""Advice for files that no format reads."""
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


def by_first_bytes(head: bytes) -> str:
    """Return the likely kind of a file that cannot be decoded, and advice."""
    return next((advice for magic, advice in _BY_MAGIC if head.startswith(magic)), NO_UTF_8)
