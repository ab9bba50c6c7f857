"""Writes fragments to safetensors files, hashed while they are written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.checkpoint.fragment import Fragment
from harness.checkpoint.index import Entry
from harness.checkpoint.staging import STAGING
from harness.checkpoint.tensor_file import header
from harness.files.regular_file import open_regular

FILE_BYTES = 2**30  # about as large as a file becomes; nothing larger is ever in memory twice
_HASHING = ThreadPoolExecutor(1, thread_name_prefix="hashing")


def start_hashing() -> None:
    """Start the thread that a save hashes in, while there surely is memory for one.

    Python waits for ever for a thread that cannot begin.
    """
    _HASHING.submit(int).result()


@dataclass(frozen=True)
class Written:
    """One written file: the size and hash that a reader checks."""

    name: str
    bytes: int
    sha256: str


def write_fragments(
    folder: Path, rank: int, fragments: Iterable[Fragment]
) -> tuple[list[Written], list[Entry]]:
    """Write a rank's fragments into files of about FILE_BYTES, on disk when this returns.

    Needs no memory beyond that of STAGING, which fragments on a GPU pass through.
    """
    written, entries = [], []
    for number, batch in enumerate(_batches(fragments)):
        name = f"rank-{rank:05d}-{number:03d}.safetensors"
        here = [Entry(f.name, f.part, f.offset, f.numel, tuple(f.tensors), name) for f in batch]
        tensors = {
            entry.key(kind): tensor
            for entry, fragment in zip(here, batch, strict=True)
            for kind, tensor in fragment.tensors.items()
        }
        written.append(_write_safetensors(folder / name, tensors))
        entries += here
    return written, entries


def _batches(fragments: Iterable[Fragment]) -> Iterator[list[Fragment]]:
    """Fragments, large ones cut, in groups that fill a file."""
    batch: list[Fragment] = []
    size = 0
    for fragment in fragments:
        if not fragment.numel:
            continue  # a buffer without elements
        most = max(1, FILE_BYTES * fragment.numel // fragment.bytes)
        for start in range(0, fragment.numel, most):
            part = fragment.narrow(start, min(most, fragment.numel - start))
            if batch and size + part.bytes > FILE_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(part)
            size += part.bytes
    if batch:
        yield batch


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> Written:
    head, places = header(tensors)
    digest = hashlib.sha256()
    # Hashing in a thread of its own goes on while the disk takes the file.
    with path.open("xb") as file:
        hashed = [_HASHING.submit(digest.update, head)]
        file.write(head)
        for tensor in map(tensors.__getitem__, places):
            for part in STAGING.on_host(tensor):
                hashed.append(_HASHING.submit(digest.update, part.numpy().data))
                if STAGING.is_remote(tensor):
                    STAGING.used_until(hashed[-1].result)
                file.write(part.numpy().data)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
        for done in hashed:
            done.result()
    return Written(path.name, size, digest.hexdigest())


def write_bytes(path: Path, data: bytes) -> Written:
    """Write one small file, on disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Written(path.name, len(data), hashlib.sha256(data).hexdigest())


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file on disk."""
    with open_regular(path) as file:
        # The disk goes on reading while this hashes.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()
