"""Units of memory."""

from __future__ import annotations

GIB = 2**30


def as_size(size: float) -> str:
    """Bytes in GiB, or in MiB where that would be less than one: a small disk is not 0.00 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.2f} MiB"
