"""The line of code that does something to a tensor: the harness's, DeepSpeed's or transformers'."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType

REPOSITORY = str(Path(__file__).resolve().parents[3])
_OWNERS = ("deepspeed/", "transformers/", "harness/", "tests/", "tools/")
_PASSED_THROUGH = (
    *("tools/proofs/streams/", "deepspeed/comm/", "deepspeed/utils/nvtx"),
    "deepspeed/utils/timer",
)


def place() -> str:
    """Return file:line of the innermost line of those owners that leads here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if name := _owned(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def is_within(part: str, frames: int = 16) -> bool:
    """Return True if one of the innermost frames is of a file whose path has `part` in it."""
    frame = sys._getframe(1)
    for _ in range(frames):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if part in frame.f_code.co_filename:
            return True
    return False


@functools.cache
def _owned(file: str) -> str:
    """Return a file's path in its package; "" where it belongs to nobody of interest."""
    _, installed, inside = file.rpartition("/site-packages/")
    if not installed:
        inside = file.removeprefix(f"{REPOSITORY}/")
    owned = inside.startswith(_OWNERS) and not inside.startswith(_PASSED_THROUGH)
    return inside if owned else ""
