"""Safetensors files: hashed while written, read by element ranges, staged through host memory.

They are not memory-mapped: mapped pages would count as this process's memory until the last tensor
is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from harness.checkpoint.index import Entry
from harness.checkpoint.manifest import Written
from harness.errors import Unusable
from harness.files.regular_file import open_regular
from harness.files.tensor_header import StoredTensor, header_of
from harness.layout.box import Part


@dataclass(frozen=True)
class Fragment:
    """Elements [offset, offset + numel) of a flattened slice of a parameter, as views of live
    memory.

    `tensors`, by kind: "weight" (the fp32 master weight if there is one), optimizer states by the
    optimizer's names ("exp_avg", ...), each (numel,); or only "buffer". `part`: the whole
    parameter, unless an axis of the layout slices it.
    """

    name: str
    part: Part
    offset: int
    tensors: dict[str, torch.Tensor]

    @property
    def numel(self) -> int:
        """Number of elements in this fragment."""
        return next(iter(self.tensors.values())).numel()

    @property
    def bytes(self) -> int:
        """Total bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def narrow(self, start: int, numel: int) -> Fragment:
        """Return elements [start, start + numel) of this fragment."""
        tensors = {kind: t.narrow(0, start, numel) for kind, t in self.tensors.items()}
        return replace(self, offset=self.offset + start, tensors=tensors)

    def share(self, index: int, shares: int) -> Fragment | None:
        """Return the elements that replica `index` of `shares` writes; None if there are none."""
        size = math.ceil(self.numel / shares)
        start = index * size
        numel = min(size, self.numel - start)
        return self.narrow(start, numel) if numel > 0 else None


_ALIGNED_BYTES = 64  # alignment of copies: fits any dtype and cache lines


def pinned_bytes(count: int) -> torch.Tensor:
    """Return a (count,) uint8 tensor in pinned host memory, or in pageable memory, which is slower
    to fill, if that much cannot be pinned.
    """
    try:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(count, dtype=torch.uint8)


def is_remote(tensor: torch.Tensor) -> bool:
    """Return True for a tensor on an accelerator."""
    return tensor.device.type != "cpu"


class HostCopies:
    """Copies fragments to host memory. Those on an accelerator go to one buffer, which all saves
    reuse.

    The buffer's pages are pinned, so copies need no staging, and are faulted in only once. The host
    waits once, after launching all copies.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def of(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Return copies on the host, complete on return and valid until the next call."""
        tensors = [tensor for fragment in fragments for tensor in fragment.tensors.values()]
        needed = sum(_aligned(tensor.nbytes) for tensor in tensors if is_remote(tensor))
        if needed > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before the next allocation
            self._buffer = pinned_bytes(needed)
        end = 0
        copies = []
        for fragment in fragments:
            on_host = {}
            for kind, tensor in fragment.tensors.items():
                if is_remote(tensor):
                    place = self._buffer[end : end + tensor.nbytes].view(tensor.dtype)
                    on_host[kind] = place.copy_(tensor.detach(), non_blocking=True)
                    end += _aligned(tensor.nbytes)
                else:
                    on_host[kind] = tensor.detach().clone()
            copies.append(replace(fragment, tensors=on_host))
        if end:
            torch.accelerator.synchronize()
        return copies


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


PART_BYTES = 2**25  # size of each half of the buffer; a bus transfers it in two milliseconds


class Staging:
    """A reusable double buffer: while one half is hashed or sent, the other is filled."""

    def __init__(self) -> None:
        self._halves: list[torch.Tensor] = []
        self._users: list[Callable[[], object]] = []

    def on_host(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a tensor's bytes in order, uint8 on the host. Those of an accelerator come in
        chunks, each valid until the function passed to `used_until` has returned.
        """
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if not is_remote(tensor):
            yield flat
            return
        for part in flat.split(PART_BYTES):
            yield self._free_half()[: part.numel()].copy_(part)

    def fill(
        self, out: torch.Tensor, dtype: torch.dtype, read: Callable[[torch.Tensor], None]
    ) -> None:
        """Fill flat `out` on an accelerator with elements that `read` provides as `dtype`, in
        order.

        The last copies may still be in progress on return, but precede any work launched later.
        """
        for part in out.split(PART_BYTES // dtype.itemsize):
            half = self._free_half()[: part.numel() * dtype.itemsize].view(dtype)
            read(half)
            # Convert on the device: copy_ would convert on the host first.
            there = half if part.dtype == dtype else half.to(part.device, non_blocking=True)
            part.copy_(there, non_blocking=True)
            self.used_until(_sent(part.device))

    def used_until(self, done: Callable[[], object]) -> None:
        """Refill the half that was filled last only after `done` has returned."""
        self._users[-1] = done

    def _free_half(self) -> torch.Tensor:
        if not self._halves:
            self._halves = [*pinned_bytes(2 * PART_BYTES).split(PART_BYTES)]
            self._users = [lambda: None] * 2
        self._halves.append(self._halves.pop(0))
        self._users.append(self._users.pop(0))
        self._users[-1]()
        self._users[-1] = lambda: None
        return self._halves[-1]


def _sent(device: torch.device) -> Callable[[], object]:
    """Return a function that waits for all work launched on the device so far."""
    event = torch.accelerator.current_stream(device).record_event()
    wait: Callable[[], object] = event.synchronize
    return wait


STAGING = Staging()
"""The buffer of this process, which saves or loads one tensor at a time. Unused for CPU tensors."""


# safetensors' dtype names (github.com/huggingface/safetensors#format).
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_CHUNK_BYTES = 2**22


def header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file of `tensors` (may be on meta), and each tensor's offset after it.

    Sorted as in safetensors, wide elements first, so that all tensors are aligned.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor = tensors[name]
        places[name] = end
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places


class TensorReader:
    """Reads elements of a file's tensors. Raises Unusable if they are missing, and OSError."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_regular(path)
        self._stored = header_of(self._file, path)

    def __contains__(self, key: str) -> bool:
        """Return True if the file has a tensor of that name."""
        return key in self._stored

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored."""
        stored = self._tensor(key)
        if stored.dtype not in _BY_NAME:
            raise Unusable(f"{self._path} holds {key} as {stored.dtype}, not a checkpoint's dtype")
        return _BY_NAME[stored.dtype]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._tensor(key).shape

    def _tensor(self, key: str) -> StoredTensor:
        if key not in self._stored:
            raise Unusable(f"{self._path} lacks {key}")
        return self._stored[key]

    def read(self, key: str, first: int, out: torch.Tensor) -> None:
        """Fill flat `out`, of any dtype and device, with the tensor's elements from `first` on."""
        dtype, stored = self.dtype(key), self._tensor(key)
        if first + out.numel() > stored.numel:
            raise Unusable(
                f"{self._path} has {stored.numel} elements of {key}, not {first + out.numel()}"
            )
        self._file.seek(stored.start + first * dtype.itemsize)
        if is_remote(out):
            STAGING.fill(out, dtype, lambda host: self._read_into(host, key))
            return
        if out.dtype == dtype and out.is_contiguous():
            self._read_into(out, key)
            return
        for part in out.split(_CHUNK_BYTES // dtype.itemsize):
            chunk = torch.empty(part.numel(), dtype=dtype)
            self._read_into(chunk, key)
            part.copy_(chunk)

    def _read_into(self, host: torch.Tensor, key: str) -> None:
        data = host.detach().view(torch.uint8).numpy().data
        if self._file.readinto(data) != len(data):
            raise Unusable(f"{self._path} ends within {key}")


class TensorWriter:
    """Writes a file, starting with the header; `tensors` may be on meta."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        head, self._at = header(tensors)
        self._start = len(head)
        self._missing = sum(tensor.nbytes for tensor in tensors.values())
        self._file = path.open("xb")
        self._file.write(head)
        self._file.truncate(self._start + self._missing)

    def write(self, name: str, offset: int, elements: torch.Tensor) -> None:
        """Write a tensor's elements from `offset` on; CPU tensors of the header's dtype."""
        self._file.seek(self._start + self._at[name] + offset * elements.itemsize)
        self._file.write(elements.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._missing -= elements.nbytes

    def close(self) -> None:
        """Flush the file to disk and close it."""
        assert not self._missing, f"{self._file.name} lacks {self._missing} bytes"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


FILE_BYTES = 2**30  # approximate maximum file size
_HASHING = ThreadPoolExecutor(1, thread_name_prefix="hashing")


def start_hashing() -> None:
    """Start the thread that hashes during saves, early enough that there is memory for it.

    Python waits forever for a thread that cannot start.
    """
    _HASHING.submit(int).result()


def write_fragments(
    folder: Path, rank: int, fragments: Iterable[Fragment]
) -> tuple[list[Written], list[Entry]]:
    """Write a rank's fragments to files of at most about FILE_BYTES, flushed to disk on return.

    Needs no memory beyond STAGING, through which fragments on a GPU pass.
    """
    written, entries = [], []
    for number, batch in enumerate(_batches(fragments)):
        name = f"rank-{rank:05d}-{number:03d}.safetensors"
        saved = [Entry(f.name, f.part, f.offset, f.numel, tuple(f.tensors), name) for f in batch]
        tensors = {
            entry.key(kind): tensor
            for entry, fragment in zip(saved, batch, strict=True)
            for kind, tensor in fragment.tensors.items()
        }
        written.append(_write_safetensors(folder / name, tensors))
        entries += saved
    return written, entries


def _batches(fragments: Iterable[Fragment]) -> Iterator[list[Fragment]]:
    """Yield groups of fragments that fill a file; large fragments are split."""
    batch: list[Fragment] = []
    size = 0
    for fragment in fragments:
        if not fragment.numel:
            continue  # a buffer without elements
        max_numel = max(1, FILE_BYTES * fragment.numel // fragment.bytes)
        for start in range(0, fragment.numel, max_numel):
            part = fragment.narrow(start, min(max_numel, fragment.numel - start))
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
    # Hashes in a separate thread, in parallel with writing.
    with path.open("xb") as file:
        hashed = [_HASHING.submit(digest.update, head)]
        file.write(head)
        for tensor in map(tensors.__getitem__, places):
            for part in STAGING.on_host(tensor):
                hashed.append(_HASHING.submit(digest.update, part.numpy().data))
                if is_remote(tensor):
                    STAGING.used_until(hashed[-1].result)
                file.write(part.numpy().data)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
        for done in hashed:
            done.result()
    return Written(path.name, size, digest.hexdigest())


def write_bytes(path: Path, data: bytes) -> Written:
    """Write one small file, flushed to disk on return."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Written(path.name, len(data), hashlib.sha256(data).hexdigest())
