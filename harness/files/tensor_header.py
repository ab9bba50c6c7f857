"""Reads the header of a safetensors file and checks it against the file's size.

Format (github.com/huggingface/safetensors#format): 8 bytes with the header's length, the header as
JSON, then the tensors without gaps.
"""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from harness.errors import Unusable
from harness.files.first_bytes import GET_LFS, LFS_POINTER
from harness.files.regular_file import open_regular
from harness.files.table import Table

MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
# Bytes per element by dtype; of tensors with other dtypes only the offsets are checked.
_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file; its data is bytes [`start`, `end`) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path, links: bool = False) -> dict[str, StoredTensor]:
    """Return the tensors of a file. Raises Unusable if it is not a complete file, and OSError."""
    with open_regular(path, links) as file:
        return header_of(file, path)


def header_of(file: BinaryIO, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of an open file, as read_header does."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(len(LFS_POINTER))
    if len(start) < 8:
        raise Unusable(f"{path} has {size} bytes: it is empty or truncated")
    (length,) = struct.unpack("<Q", start[:8])
    if length > min(size - 8, MOST_HEADER_BYTES):
        raise Unusable(
            f"{path} has {size} bytes and is not a safetensors file: {_looks_like(start)}"
        )
    file.seek(8)
    try:
        content = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise Unusable(
            f"{path} has {size} bytes and is not a safetensors file: its header is not JSON"
        ) from None
    tensors = _tensors(Table(content, path), 8 + length)
    end = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise Unusable(
            f"{path} has {size} bytes, but its tensors end at {end}: "
            + ("it is truncated; copy or download it again" if end > size else "something follows")
        )
    return tensors


def _tensors(content: Table, base: int) -> dict[str, StoredTensor]:
    tensors = {}
    for name, about in content.tables():
        if name == "__metadata__":
            continue
        offsets = about.counts("data_offsets")
        if len(offsets) != 2:
            raise Unusable(f"{content.file}: {name} has {len(offsets)} data_offsets, not 2")
        first, end = offsets
        tensors[name] = StoredTensor(
            about.text("dtype"), about.counts("shape"), base + first, base + end
        )
    place = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != place or tensor.end < place:
            raise Unusable(
                f"{content.file}: the bytes of {name} begin {tensor.start - base} after the "
                f"header, not where the previous tensor ends ({place - base})"
            )
        if (width := _BYTES.get(tensor.dtype)) and tensor.numel * width != tensor.end - place:
            raise Unusable(
                f"{content.file}: {name} has {tensor.end - place} bytes, which does not match "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        place = tensor.end
    return tensors


def _looks_like(start: bytes) -> str:
    """Return what a file with these first bytes probably is."""
    if start == LFS_POINTER:
        return f"it is {GET_LFS}"
    if start.startswith((b"<!DOCTYPE", b"<html", b"<!doctype")):
        return "it is a web page; download the file itself"
    if start.startswith(b"PK") or start[:1] == b"\x80":
        return "it is a pickle of torch.save; convert it"
    if start.startswith((b"GGUF", b"\x1f\x8b")):
        return "it is a GGUF or a compressed file"
    return "it begins with unexpected bytes"
