"""Fragments to safetensors files and back: hashed while they are written, read by byte ranges."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.checkpoint.fragment import WEIGHT, Fragment
from harness.checkpoint.index import Entry
from harness.checkpoint.tensor_file import TensorReader, header
from harness.errors import Unusable
from harness.files.regular_file import open_regular
from harness.layout.box import Overlap, Part, Piece, overlaps

_OPEN_FILES = 200  # a process may open 1,024; other layouts read from the files of all ranks
FILE_BYTES = 2**30  # about as large as a file becomes; nothing larger is ever in memory twice
_HASHING = ThreadPoolExecutor(1, thread_name_prefix="hashing")


def start_hashing() -> None:
    """Start the thread that a save hashes in, while there surely is memory for one.

    Python waits for ever for a thread that cannot begin.
    """
    _HASHING.submit(int).result()


@dataclass(frozen=True)
class Written:
    """One file as it was written: what a reader must find."""

    name: str
    bytes: int
    sha256: str


def write_fragments(
    folder: Path, rank: int, fragments: Iterable[Fragment]
) -> tuple[list[Written], list[Entry]]:
    """Write a rank's fragments into files of about FILE_BYTES, on disk when this returns.

    Needs no memory beyond one tensor of a file: where fragments are on a GPU, that one's copy.
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
            data = tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy().data
            hashed.append(_HASHING.submit(digest.update, data))
            file.write(data)
            if tensor.device.type != "cpu":
                hashed[-1].result()  # its copy goes before the next one comes
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
    """The hash of a file as it is on disk."""
    with open_regular(path) as file:
        # The disk goes on reading while this hashes.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


class Reader:
    """Reads any elements of any tensor of a checkpoint, whatever layout wrote it."""

    def __init__(self, folder: Path, entries: Iterable[Entry]) -> None:
        self.folder = folder
        self.by_name: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            self.by_name[entry.name].append(entry)
        self._open: dict[str, TensorReader] = {}

    def optimizer_kinds(self, name: str) -> list[str]:
        """What the optimizer held of a parameter beside its weight."""
        return [kind for e in self.by_name.get(name, ())[:1] for kind in e.kinds if kind != WEIGHT]

    @torch.no_grad()
    def fill(
        self, name: str, kind: str, offset: int, out: torch.Tensor, part: Part | None = None
    ) -> None:
        """Fill flat `out` with elements [offset, offset + numel) of a parameter's `kind`, or of a
        `part` of it.

        Raises Unusable where the checkpoint lacks some of them.
        """
        entries, filled = self.by_name.get(name, ()), 0
        for entry in entries:
            if kind not in entry.kinds:
                continue
            wanted = Piece(part or Part.of(entry.shape), offset, out.numel())
            for overlap in overlaps(wanted, entry.piece):
                self._read(entry, kind, overlap, out)
                filled += overlap.numel
        if filled != out.numel():
            end = offset + out.numel()
            raise Unusable(
                f"{self.folder} has {filled} of elements {offset} to {end} of {name}/{kind}"
            )

    def _read(self, entry: Entry, kind: str, overlap: Overlap, out: torch.Tensor) -> None:
        """Fill what of `out` lies in one fragment."""
        file, key = self._file(entry.file), entry.key(kind)
        at, first = overlap.first
        if overlap.is_flat:
            file.read(key, first, out[at : at + overlap.numel])
            return
        rows = torch.empty(overlap.span(1), dtype=file.dtype(key))
        file.read(key, first, rows)
        to, of = overlap.strides
        target = out.as_strided(overlap.shape, to, out.storage_offset() + at)
        target.copy_(rows.as_strided(overlap.shape, of))

    def whole(self, name: str, kind: str) -> torch.Tensor:
        """One tensor in its shape, on the host."""
        entry = self.by_name[name][0]
        dtype = self._file(entry.file).dtype(entry.key(kind))
        flat = torch.empty(torch.Size(entry.shape).numel(), dtype=dtype)
        self.fill(name, kind, 0, flat)
        return flat.view(entry.shape)

    def _file(self, name: str) -> TensorReader:
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.clear()
            self._open[name] = TensorReader(self.folder / name)
        return self._open[name]
