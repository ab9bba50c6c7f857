"""A large corpus of token ids, the same on every machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from harness.config.data_section import DataConfig
from harness.data.build import build_data
from harness.data.order import mix
from harness.data.spec import DataSpec
from harness.files.token_index import HEADER, MAGIC

IDS = 300
"""Ids that are drawn; a tokenizer has more, its separator among the first."""
_FIRST_ID = 100
_BLOCK = 1 << 22  # ids that are drawn, and repeated
_MEAN_FACTOR = 110  # the mean length is about 2.2 times it
_TAIL = 0.55  # exponent of a Pareto-like tail
_LONGEST = 1 << 17
_UINT16 = 8  # Megatron-LM's code


@dataclass(frozen=True)
class Made:
    """A corpus that was made."""

    documents: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    prefix: str
    tokenizer: str


def make_corpus(folder: Path, documents: int, times: int = 1) -> Made:
    """Write PREFIX.bin, PREFIX.idx and a tokenizer, unless they are there.

    `times`: documents are so many times as long. Beyond 1 the .bin is a hole: all sizes and places
    are those of a file that is full, but its ids are zeros that take no room.
    """
    facts = folder / f"corpus-{documents}.json"
    if facts.is_file():
        return Made(**json.loads(facts.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer"
    if not tokenizer.is_dir():
        small = DataConfig(vocab_size=512, cache_dir=str(folder / "cache"))
        build_data(DataSpec(small)).tokenizer.save_pretrained(tokenizer)
    prefix, sizes = folder / f"corpus-{documents}", _lengths(documents) * times
    with prefix.with_suffix(".bin").open("wb") as file:
        if times == 1:
            _write_ids(file, int(sizes.sum()))
        else:
            file.truncate(int(sizes.sum()) * 2)
    offsets = np.r_[0, np.cumsum(sizes[:-1])] * 2
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, _UINT16, documents, documents + 1))
        file.write(sizes.astype("<i4").data)
        file.write(offsets.astype("<i8").data)
        file.write(np.arange(documents + 1, dtype="<i8").data)
    made = Made(
        documents,
        int(sizes.sum()),
        prefix.with_suffix(".bin").stat().st_size,
        prefix.with_suffix(".idx").stat().st_size,
        str(prefix),
        str(tokenizer),
    )
    facts.write_text(json.dumps(asdict(made)))
    return made


def _lengths(documents: int) -> NDArray[np.int64]:
    """Return skewed lengths: most documents are short, a few thousands of tokens long."""
    uniform = mix(np.arange(1, documents + 1, dtype=np.uint64)).astype(np.float64) / 2**64
    lengths = _MEAN_FACTOR * np.maximum(uniform, 1e-9) ** -_TAIL
    return np.minimum(lengths, _LONGEST).astype(np.int64)


def _write_ids(file: BinaryIO, count: int) -> None:
    block = (mix(np.arange(_BLOCK, dtype=np.uint64)) % np.uint64(IDS)).astype("<u2") + _FIRST_ID
    for first in range(0, count, _BLOCK):
        file.write(np.ascontiguousarray(block[: count - first], dtype="<u2").data)
