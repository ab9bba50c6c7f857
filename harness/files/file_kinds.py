"""Determines the kind of a file from its name or, if that is not enough, from its first bytes."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Literal

Format = Literal["text", "jsonl"]
# "binary" files in a folder are left out; "data" files are refused everywhere.
FileKind = Literal["text", "lines", "data", "binary"]

_HEAD_BYTES = 4096
MOST_LINE_BYTES = 1 << 24  # of a first line, to see whether it is JSON
_LINES = {".jsonl", ".ndjson"}
_PROSE = """
txt text md markdown mdx rst adoc asciidoc org tex ltx sty cls bib html htm xhtml xml svg
srt vtt log po pod man texi tokens raw wiki
"""
_CODE = """
py pyi pyx c h cc cpp cxx hh hpp hxx cu cuh java kt kts scala groovy gradle js mjs cjs jsx
ts tsx vue svelte go rs rb php pl pm sh bash zsh fish ps1 bat lua r m mm swift hs ml mli
fs cs vb ex exs erl hrl clj cljs lisp el scm f f90 f95 for asm s v sv vhd vhdl proto
thrift graphql css scss sass less sql tf nix dart zig nim d pas lean awk sed tcl cmake mk
am ac in diff patch yaml yml toml ini cfg conf properties lock
"""
_TEXT = {f".{suffix}" for suffix in f"{_PROSE} {_CODE}".split()}

_LINES_WANTED = '{"text": ...} or {"prompt": ..., "completion": ...}'
_ARRAY = "is an array: write token ids as a .bin/.idx pair (Megatron-LM's format)"
_DOCUMENT = "is a document with markup of its own: extract its text into .txt"
_UTF_16 = "is UTF-16: iconv -f UTF-16 -t UTF-8 FILE > NEW"
_JSON = (
    "is JSON, but not one object a line: jq -c '.[]' FILE > NEW.jsonl writes the elements of an "
    f"array as lines, each {_LINES_WANTED}"
)


def _compressed(command: str) -> str:
    return f"is compressed: {command} FILE, and name what comes out"


def _table(reader: str) -> str:
    return (
        f"is a table: write a .jsonl, each line {_LINES_WANTED}, as with pandas.{reader}(FILE)"
        "[[COLUMN]].rename(columns={COLUMN: 'text'}).to_json(NEW, orient='records', lines=True)"
    )


_ADVICE = {
    **dict.fromkeys((".csv", ".tsv", ".psv"), _table("read_csv")),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), _table("read_excel")),
    ".parquet": _table("read_parquet"),
    **dict.fromkeys((".arrow", ".feather"), _table("read_feather")),
    **dict.fromkeys((".gz", ".tgz"), _compressed("gunzip -k")),
    **dict.fromkeys((".zst", ".zstd"), _compressed("zstd -d")),
    ".bz2": _compressed("bunzip2 -k"),
    ".xz": _compressed("unxz -k"),
    ".lz4": _compressed("lz4 -d"),
    **dict.fromkeys((".zip", ".7z", ".tar"), "is an archive: unpack it, and name its folder"),
    **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".h5", ".hdf5"), _ARRAY),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".ipynb"), _DOCUMENT),
}
_MAGIC = (
    (b"\x1f\x8b", _ADVICE[".gz"]),
    (b"\x28\xb5\x2f\xfd", _ADVICE[".zst"]),
    (b"BZh", _ADVICE[".bz2"]),
    (b"\xfd7zXZ\x00", _ADVICE[".xz"]),
    (b"PK\x03\x04", _ADVICE[".zip"]),
    (b"PAR1", _ADVICE[".parquet"]),
    (b"ARROW1", _ADVICE[".arrow"]),
    (b"%PDF-", _DOCUMENT),
    (b"\x93NUMPY", _ARRAY),
    (codecs.BOM_UTF16_LE, _UTF_16),
    (codecs.BOM_UTF16_BE, _UTF_16),
)
NO_UTF_8 = "is no UTF-8 text (of Latin-1, iconv -f LATIN1 -t UTF-8 FILE > NEW makes it)"


def reads_lines(file: Path, format: Format | None) -> bool:
    """Return True if a text file holds a document per line, not one document in all."""
    return format == "jsonl" or (format is None and file.suffix.lower() in {*_LINES, ".json"})


def kind_of(file: Path, format: Format | None) -> tuple[FileKind, str]:
    """Return the kind of a file, and for "data" and "binary" the reason and advice.

    The file is opened only if the suffix does not determine its kind. Raises OSError.
    """
    suffix = file.suffix.lower()
    if format is None and suffix in _LINES:
        return "lines", ""
    if format is None and suffix in _TEXT:
        return "text", ""
    if format is None and suffix in _ADVICE:
        return "data", _ADVICE[suffix]
    head = _head(file)
    if not _is_text(head):
        return "binary", _by_magic(head) or NO_UTF_8
    if format is not None:
        return ("lines" if format == "jsonl" else "text"), ""
    if suffix == ".json":
        return ("lines", "") if _begins_with_a_line(file) else ("data", _JSON)
    if suffix:
        return "data", f"has the unknown suffix {file.suffix}: data.format=text reads it as text"
    return "text", ""


def why_not_utf_8(file: Path) -> str:
    """Return the likely kind of a file that cannot be decoded, and advice."""
    return _by_magic(_head(file)) or NO_UTF_8


def first_line(file: Path, most_bytes: int = _HEAD_BYTES) -> str | None:
    """Return the first nonblank line in a file's first bytes; None if they are not UTF-8."""
    head = _head(file, most_bytes)
    if not _is_text(head):
        return None
    lines = head.decode("utf-8-sig", errors="ignore").split("\n")  # the last one may be cut
    return next((line.strip() for line in lines if line.strip()), "")


def _head(file: Path, most_bytes: int = _HEAD_BYTES) -> bytes:
    with file.open("rb") as opened:
        return opened.read(most_bytes)


def _by_magic(head: bytes) -> str | None:
    return next((advice for magic, advice in _MAGIC if head.startswith(magic)), None)


def _is_text(head: bytes) -> bool:
    """Return True if the first bytes of a file are UTF-8; the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _begins_with_a_line(file: Path) -> bool:
    """Return True if the first nonblank line of a file is a JSON object."""
    try:
        return isinstance(json.loads(first_line(file, MOST_LINE_BYTES) or ""), dict)
    except (ValueError, RecursionError):
        return False
