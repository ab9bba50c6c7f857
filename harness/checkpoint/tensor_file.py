"""One safetensors file: read by elements, written in any order; never mapped, never whole.

Pages of a mapped file would count as this process's memory until the last tensor is read.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from harness.checkpoint.staging import STAGING
from harness.errors import Unusable
from harness.files.regular_file import open_regular
from harness.files.tensor_header import StoredTensor, header_of

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
