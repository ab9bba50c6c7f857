"""Where a process's pages lie in physical memory, and how to have them lie badly.

Each 4 KiB page of a process may lie anywhere. In a virtual machine the host maps the guest's memory
in larger blocks: a process whose pages are scattered over many of them needs more of the
processor's cached translations.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BLOCK = 2**21  # bytes, what x86 maps at once
_PAGE = mmap.PAGESIZE
_PRESENT, _FRAME = np.uint64(1 << 63), np.uint64((1 << 55) - 1)  # Linux: pagemap.rst
_SCATTERED = 6 * 2**30  # bytes
_APART = 4  # of so many pages one is free


def density(pid: int) -> float:
    """Return the share that a process's own pages have in the 2 MiB blocks where they lie.

    Of its heap and its large anonymous mappings. NaN where the kernel does not tell: it tells root.
    """
    frames = []
    try:
        with Path(f"/proc/{pid}/pagemap").open("rb") as pages:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split()
                begin, end = (int(text, 16) for text in fields[0].split("-"))
                if fields[-1] != "[heap]" and (len(fields) > 5 or end - begin < BLOCK):
                    continue
                pages.seek(begin // _PAGE * 8)
                entries = np.frombuffer(pages.read((end - begin) // _PAGE * 8), np.uint64)
                frames.append(entries[(entries & _PRESENT) != 0] & _FRAME)
    except OSError:
        return math.nan
    return share_of_blocks(np.concatenate(frames)) if frames else math.nan


def share_of_blocks(frames: np.ndarray) -> float:
    """Return the share that pages fill of the 2 MiB blocks that hold any of them.

    `frames`: uint64, of each page its number in physical memory; all zero, which is NaN, where the
    kernel does not show them.
    """
    if not frames.any():
        return math.nan
    blocks = np.unique(frames // np.uint64(BLOCK // _PAGE)).size
    return float(frames.size * _PAGE / (blocks * BLOCK))


@contextlib.contextmanager
def scattered_memory() -> Iterator[None]:
    """In the block, the free memory that the kernel hands out first is one page of four."""
    with mmap.mmap(-1, _SCATTERED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.madvise(mmap.MADV_NOHUGEPAGE)
        for start in range(0, _SCATTERED, _PAGE):
            held[start] = 1
        for start in range(0, _SCATTERED, _APART * _PAGE):
            held.madvise(mmap.MADV_DONTNEED, start, _PAGE)
        yield
