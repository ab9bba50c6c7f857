"""The header of a Megatron .idx, which stores the position of each document in a .bin.

The layout is that of Megatron-LM's MMapIndexedDataset: 9 bytes of magic, uint64 version, uint8
dtype of the ids, uint64 number of sequences, uint64 number of document bounds; then int32 tokens
per sequence, int64 byte offset per sequence, and int64 document bounds in sequences.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from harness.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# uint16 is 6 in DeepSpeed but 8 in Megatron-LM, where 6 and 7 are floats.
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<u2", 7: "<u4", 8: "<u2"}


@dataclass(frozen=True)
class IndexHeader:
    """The content of an .idx header."""

    code: int
    """The dtype of the ids, a key of TYPES."""
    sequences: int
    bounds: int
    """Number of documents plus one."""
    num_bytes: int
    """Size of the .idx file in bytes."""

    @property
    def id_bytes(self) -> int:
        """Bytes per id in the .bin."""
        return int(TYPES[self.code][2:])


def read_header(path: Path) -> IndexHeader:
    """Return the header of an .idx. Raises OSError, and ConfigError if it is not a valid one."""
    num_bytes = path.stat().st_size
    if num_bytes < HEADER.size:
        raise ConfigError(f"{path} is truncated: {num_bytes} bytes, its header has {HEADER.size}")
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    magic, version, code, sequences, bounds = HEADER.unpack(header)
    if magic != MAGIC or version != 1 or code not in TYPES:
        raise ConfigError(
            f"{path} is not a Megatron index: it begins with {header[:18]!r}, not with {MAGIC!r}, "
            f"version 1 and a type from {min(TYPES)} to {max(TYPES)}"
        )
    if not sequences:
        raise ConfigError(f"{path} is empty: it describes no sequences")
    if bounds < 2:
        raise ConfigError(
            f"{path} describes {sequences} sequences, but no document ends: the program that "
            "wrote it must end each document (builder.end_document())"
        )
    return IndexHeader(code, sequences, bounds, num_bytes)
