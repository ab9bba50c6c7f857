"""Fragments to safetensors files and back: hashed while they are written, read by byte ranges."""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint.fragment import WEIGHT, Fragment
from harness.checkpoint.tensor_file import TensorReader, header
from harness.errors import Unusable
from harness.files.regular_file import open_regular
from harness.files.table import Table

INDEX = "index.json"
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


@dataclass(frozen=True)
class Entry:
    """Where a fragment is: its tensors are `key(kind)` in `file`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    kinds: tuple[str, ...]
    file: str

    def key(self, kind: str) -> str:
        """The name of one of its tensors within the file."""
        return f"{self.name}@{self.offset}/{kind}"


def to_index(entries: Iterable[Entry]) -> dict[str, Any]:
    """Entries as JSON: with a thousand ranks, what a parameter's have in common counts."""
    index: dict[str, Any] = {}
    for entry in entries:
        about = {"shape": entry.shape, "kinds": entry.kinds, "at": []}
        index.setdefault(entry.name, about)["at"].append((entry.offset, entry.numel, entry.file))
    return index


def merged(indices: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The index of all ranks; what several have (a buffer, on pipeline stages) is there once."""
    whole: dict[str, Any] = {}
    for index in indices:
        for name, about in index.items():
            pieces = whole.setdefault(name, {**about, "at": {}})["at"]
            pieces |= {offset: (offset, *rest) for offset, *rest in about["at"]}
    return {name: {**about, "at": [*about["at"].values()]} for name, about in whole.items()}


def from_index(index: object, place: object = INDEX) -> Iterator[Entry]:
    """What `to_index` was given. Raises Unusable where `index`, read from `place`, has another make
    or the pieces of a parameter are not all of its elements, each once.
    """
    for name, about in Table(index, place).tables():
        shape, kinds = about.counts("shape"), about.texts("kinds")
        end = 0
        for offset, numel, file in sorted(_piece(about, piece) for piece in about.row("at")):
            if offset != end or numel < 1:
                raise Unusable(
                    f"{place}: a piece of {name} begins at element {offset} and has {numel}, but "
                    f"the one before ends at {end}"
                )
            end = offset + numel
            yield Entry(name, shape, offset, numel, kinds, file)
        if end != math.prod(shape):
            raise Unusable(f"{place}: the pieces of {name} {list(shape)} end at element {end}")


def _piece(about: Table, piece: object) -> tuple[int, int, str]:
    """[offset, elements, file] of one piece."""
    if isinstance(piece, list | tuple) and len(piece) == 3:
        offset, numel, file = piece
        if type(offset) is type(numel) is int and type(file) is str:
            return offset, numel, file
    raise Unusable(f"{about.file}: {about.key}.at has {piece!r:.60}, not [offset, elements, file]")


def write_fragments(
    folder: Path, rank: int, fragments: Iterable[Fragment]
) -> tuple[list[Written], list[Entry]]:
    """Write a rank's fragments into files of about FILE_BYTES, on disk when this returns.

    Needs no memory beyond one tensor of a file: where fragments are on a GPU, that one's copy.
    """
    written, entries = [], []
    for number, batch in enumerate(_batches(fragments)):
        name = f"rank-{rank:05d}-{number:03d}.safetensors"
        here = [Entry(f.name, f.shape, f.offset, f.numel, tuple(f.tensors), name) for f in batch]
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
    batch, size = [], 0
    for fragment in fragments:
        if not fragment.numel:
            continue  # a buffer without elements
        most = max(1, FILE_BYTES * fragment.numel // fragment.bytes)
        for start in range(0, fragment.numel, most):
            part = fragment.part(start, min(most, fragment.numel - start))
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
            data = memoryview(tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy())
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
    def fill(self, name: str, kind: str, offset: int, out: torch.Tensor) -> None:
        """Fill flat `out` with elements [offset, offset + numel) of a parameter's `kind`.

        Raises Unusable where the checkpoint lacks some of them.
        """
        end, filled = offset + out.numel(), 0
        for entry in self.by_name.get(name, ()):
            first, last = max(offset, entry.offset), min(end, entry.offset + entry.numel)
            if first < last and kind in entry.kinds:
                part = out[first - offset : last - offset]
                self._file(entry.file).read(entry.key(kind), first - entry.offset, part)
                filled += last - first
        if filled != out.numel():
            raise Unusable(
                f"{self.folder} has {filled} of elements {offset} to {end} of {name}/{kind}"
            )

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
