"""Safetensors files: hashed as they are written, read by elements, copied by way of the host.

Pages of a mapped file would count as this process's memory until the last tensor is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from harness.checkpoint.index import Entry, Fragment
from harness.errors import Unusable
from harness.files.regular_file import open_regular
from harness.files.tensor_header import StoredTensor, header_of

_ALIGNED_BYTES = 64  # where a copy begins: for any dtype, and whole cache lines


def pinned_bytes(count: int) -> torch.Tensor:
    """Return (count,) uint8 of host memory that an accelerator writes to by itself; where that many
    pages cannot be pinned, of ordinary memory, which is filled more slowly.
    """
    try:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(count, dtype=torch.uint8)


class HostCopies:
    """Copies fragments, those on an accelerator into one buffer that is kept from save to save.

    Its pages are pinned, so that nothing is staged, and faulted in once; all copies are launched
    before the host waits, once.
    """

    def __init__(
        self,
        is_remote: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type != "cpu",
        buffer_of: Callable[[int], torch.Tensor] = pinned_bytes,
        wait: Callable[[], None] = torch.accelerator.synchronize,
    ) -> None:
        self._is_remote, self._buffer_of, self._wait = is_remote, buffer_of, wait
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def of(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Return copies on the host, whole when this returns and valid until the next call."""
        tensors = [tensor for fragment in fragments for tensor in fragment.tensors.values()]
        needed = sum(_aligned(tensor.nbytes) for tensor in tensors if self._is_remote(tensor))
        if needed > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # given back before the next is taken
            self._buffer = self._buffer_of(needed)
        end = 0
        copies = []
        for fragment in fragments:
            on_host = {}
            for kind, tensor in fragment.tensors.items():
                if self._is_remote(tensor):
                    place = self._buffer[end : end + tensor.nbytes].view(tensor.dtype)
                    on_host[kind] = place.copy_(tensor.detach(), non_blocking=True)
                    end += _aligned(tensor.nbytes)
                else:
                    on_host[kind] = tensor.detach().clone()
            copies.append(replace(fragment, tensors=on_host))
        if end:
            self._wait()
        return copies


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


PART_BYTES = 2**25  # of each half of the buffer; a bus moves it in two milliseconds


class Staging:
    """A buffer in two halves that is kept: while one is hashed or sent, the other is filled."""

    def __init__(
        self,
        is_remote: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type != "cpu",
        buffer_of: Callable[[int], torch.Tensor] = pinned_bytes,
        sent: Callable[[torch.device], Callable[[], object]] | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """`sent`: what waits until all that was launched on a device before it has happened."""
        self.is_remote, self._buffer_of, self._part_bytes = is_remote, buffer_of, part_bytes
        self._sent = sent or _recorded
        self._halves: list[torch.Tensor] = []
        self._users: list[Callable[[], object]] = []

    def on_host(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a tensor's bytes in order, uint8 on the host; those of an accelerator in parts,
        each of them whole until `used_until` of it has returned.
        """
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if not self.is_remote(tensor):
            yield flat
            return
        for part in flat.split(self._part_bytes):
            yield self._free_half()[: part.numel()].copy_(part)

    def fill(
        self, out: torch.Tensor, dtype: torch.dtype, read: Callable[[torch.Tensor], None]
    ) -> None:
        """Fill flat `out` on an accelerator with elements that `read` gets as `dtype`, in order.

        The last may still be on their way when this returns, ahead of what is launched then.
        """
        for part in out.split(self._part_bytes // dtype.itemsize):
            half = self._free_half()[: part.numel() * dtype.itemsize].view(dtype)
            read(half)
            # Converted where it arrives: copy_ would convert on the host first.
            there = half if part.dtype == dtype else half.to(part.device, non_blocking=True)
            part.copy_(there, non_blocking=True)
            self.used_until(self._sent(part.device))

    def used_until(self, done: Callable[[], object]) -> None:
        """Let the half that was filled last be filled again only after `done` has returned."""
        self._users[-1] = done

    def _free_half(self) -> torch.Tensor:
        if not self._halves:
            self._halves = [*self._buffer_of(2 * self._part_bytes).split(self._part_bytes)]
            self._users = [lambda: None] * 2
        self._halves.append(self._halves.pop(0))
        self._users.append(self._users.pop(0))
        self._users[-1]()
        self._users[-1] = lambda: None
        return self._halves[-1]


def _recorded(device: torch.device) -> Callable[[], object]:
    event = torch.accelerator.current_stream(device).record_event()
    wait: Callable[[], object] = event.synchronize
    return wait


STAGING = Staging()
"""Of this process, which saves or loads one tensor at a time. What is on the host needs none."""


# safetensors' names (github.com/huggingface/safetensors#format) of what optimizers hold.
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

    In the order of safetensors: wide elements first, so that all are aligned.
    """
    about: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor = tensors[name]
        places[name] = end
        about[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places


class TensorReader:
    """Reads elements of the tensors of a file. Raises Unusable if it lacks them, and OSError."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_regular(path)
        self._stored = header_of(self._file, path)

    def __contains__(self, key: str) -> bool:
        """Return True if the file has a tensor of that name."""
        return key in self._stored

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype that a tensor is stored in."""
        stored = self._tensor(key)
        if stored.dtype not in _BY_NAME:
            raise Unusable(f"{self._path} holds {key} as {stored.dtype}, which no checkpoint has")
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
        if STAGING.is_remote(out):
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
    """Writes a file, its header first: `tensors` may be on meta."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        head, self._at = header(tensors)
        self._start = len(head)
        self._missing = sum(tensor.nbytes for tensor in tensors.values())
        self._file = path.open("xb")
        self._file.write(head)
        self._file.truncate(self._start + self._missing)

    def write(self, name: str, offset: int, elements: torch.Tensor) -> None:
        """Write a tensor's elements from `offset` on; on the host, in the dtype of the header."""
        self._file.seek(self._start + self._at[name] + offset * elements.itemsize)
        self._file.write(elements.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._missing -= elements.nbytes

    def close(self) -> None:
        """Close the file; all of it is on disk when this returns."""
        assert not self._missing, f"{self._file.name} lacks {self._missing} bytes"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


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
