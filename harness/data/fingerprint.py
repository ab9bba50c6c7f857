"""The fingerprint of a corpus: a hash of its token ids and document boundaries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.data.token_files import TokenFile

# Files up to this size are hashed whole, about as fast as they are read. For larger files the hash
# covers the size, the modification time and SAMPLED_BLOCKS blocks.
WHOLE_BYTES = 32 << 30
SAMPLED_BLOCKS, SAMPLED_BYTES = 64, 1 << 20
_REPORT_EVERY_BYTES = 4 << 30

Report = Callable[[str], None]


@dataclass(frozen=True)
class Ids:
    """Hash and range of a file's token ids."""

    digest: str
    lowest: int
    highest: int


def survey(file: TokenFile, modified_ns: str | None, report: Report) -> Ids:
    """Return the hash and range of all ids, or of a sample if the file is large.

    `modified_ns` enters the hash of a sample; None for this library's files, always read whole.
    """
    digest, lowest, highest, done, reported = hashlib.sha256(), 0, 0, 0, 0
    whole = modified_ns is None or file.num_bytes <= WHOLE_BYTES
    if not whole:
        digest.update(f"sample:{file.num_bytes}:{modified_ns}:".encode())
    for ids in file.blocks() if whole else _sample(file):
        digest.update(ids.data)
        lowest, highest = min(lowest, int(ids.min())), max(highest, int(ids.max()))
        done += ids.nbytes
        if done - reported > _REPORT_EVERY_BYTES:
            reported = done
            report(f"hashed {done / file.num_bytes:.0%} of {file.path}")
    return Ids(digest.hexdigest(), lowest, highest)


def _sample(file: TokenFile) -> Iterator[NDArray[np.integer]]:
    """Yield the first and last block, and one at a fixed place in each equal range between them."""
    count = SAMPLED_BYTES // file.dtype.itemsize
    last = len(file) - count
    for number in range(SAMPLED_BLOCKS):
        begin, end = (part * last // (SAMPLED_BLOCKS - 1) for part in (number, number + 1))
        place = int.from_bytes(hashlib.sha256(f"{len(file)}:{number}".encode()).digest()[:8], "big")
        inner = 0 < number < SAMPLED_BLOCKS - 1
        yield file.block(begin + place % (end - begin) if inner else begin, count)


def first_outside(file: TokenFile, vocab_size: int) -> tuple[int, int] | None:
    """Return index and value of the first id outside the vocabulary, or None if all are inside."""
    first = 0
    for ids in file.blocks():
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if outside.size:
            return first + int(outside[0]), int(ids[outside[0]])
        first += len(ids)
    return None


def combined(ids: Ids, layout: str) -> str:
    """Return the fingerprint: a hash of ids and document layout, then a hash of the layout alone.

    Sample order depends on the layout alone (order_key), so a run that resumes with corrected ids
    keeps its order. Earlier versions wrote only the layout.
    """
    return f"{hashlib.sha256(f'{layout}:{ids.digest}'.encode()).hexdigest()}-{layout}"


def order_key(fingerprint: str) -> str:
    """Return the part of a fingerprint that determines the sample order."""
    return fingerprint.rpartition("-")[2]


def joined(fingerprints: Sequence[str]) -> str:
    """Return the fingerprint of several sources; a single source keeps its own."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    layout = hashlib.sha256(" ".join(map(order_key, fingerprints)).encode()).hexdigest()
    return f"{hashlib.sha256(' '.join(fingerprints).encode()).hexdigest()}-{layout}"
