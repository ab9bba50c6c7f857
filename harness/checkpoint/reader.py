"""Reads the tensors of a checkpoint by element ranges, for any layout."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.checkpoint.index import WEIGHT, Entry, Index
from harness.checkpoint.manifest import PROBE, Checkpoint, read_index
from harness.checkpoint.tensor_file import TensorReader
from harness.errors import Unusable
from harness.layout.box import Overlap, Part, Piece, overlaps

_OPEN_FILES = 200  # of at most 1,024 per process; another layout may need the files of all ranks


class Reader:
    """Reads any elements of any tensor of a checkpoint, regardless of the layout that wrote it."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._open: dict[str, TensorReader] = {}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Reader:
        """Return the reader of a checkpoint. Raises Unusable if the index cannot be read."""
        return cls(checkpoint.path, read_index(checkpoint.path))

    def optimizer_kinds(self, name: str) -> list[str]:
        """Return the kinds of a parameter's optimizer states."""
        return [kind for kind in self.index.kinds(name) if kind != WEIGHT]

    @torch.no_grad()
    def fill(
        self, name: str, kind: str, offset: int, out: torch.Tensor, part: Part | None = None
    ) -> None:
        """Fill flat `out` with elements [offset, offset + numel) of a parameter's `kind`, or of a
        slice `part` of it.

        Raises Unusable if the checkpoint lacks some of them.
        """
        filled, entries = 0, list[Entry]()
        if kind in self.index.kinds(name):
            piece = Piece(part or Part.of(self.index.shape(name)), offset, out.numel())
            entries = self.index.entries(name, near=piece)
        for entry in entries:
            for overlap in overlaps(piece, entry.piece):
                self._read(entry, kind, overlap, out)
                filled += overlap.numel
        if filled != out.numel():
            end = offset + out.numel()
            raise Unusable(
                f"{self.folder} has only {filled} of elements {offset} to {end} of {name}/{kind}"
            )

    def _read(self, entry: Entry, kind: str, overlap: Overlap, out: torch.Tensor) -> None:
        """Fill the elements of `out` that are in one fragment."""
        file, key = self._file(entry.file), entry.key(kind)
        at, first = overlap.first
        if overlap.is_flat:
            file.read(key, first, out[at : at + overlap.numel])
            return
        rows = torch.empty(overlap.span(1), dtype=file.dtype(key))
        file.read(key, first, rows)
        out_strides, file_strides = overlap.strides
        target = out.as_strided(overlap.shape, out_strides, out.storage_offset() + at)
        target.copy_(rows.as_strided(overlap.shape, file_strides))

    def whole(self, name: str, kind: str) -> torch.Tensor:
        """Return a full tensor in its shape, on the CPU."""
        entry, shape = self.index.entries(name)[0], self.index.shape(name)
        dtype = self._file(entry.file).dtype(entry.key(kind))
        flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
        self.fill(name, kind, 0, flat)
        return flat.view(shape)

    def _file(self, name: str) -> TensorReader:
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.clear()
            self._open[name] = TensorReader(self.folder / name)
        return self._open[name]


_IGNORED = -100  # label of tokens without loss
_PROBE_KEYS = ("input_ids", "labels", "position_ids", "goes_on")


def read_probe(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the probe batch: input_ids, labels, and optionally position_ids and goes_on.

    Each is (samples, seq_len) int64, except goes_on, which is (samples,): 1 if the sample continues
    the text of the previous one. Raises Unusable if they are not a batch of this model.
    """
    path = checkpoint.path / PROBE
    reader = TensorReader(path)
    keys = [*_PROBE_KEYS[:2], *(key for key in _PROBE_KEYS[2:] if key in reader)]
    tensors = {}
    for key in keys:
        dtype, shape = reader.dtype(key), reader.shape(key)
        wanted = reader.shape(keys[0])
        wanted = wanted[:1] if key == "goes_on" else wanted
        fits = len(reader.shape(keys[0])) == 2 and 0 not in shape and shape == wanted
        if dtype != torch.int64 or not fits:
            raise Unusable(f"{path} holds {key} as {dtype} {list(shape)}, not a batch")
        tensors[key] = torch.empty(shape, dtype=dtype)
        reader.read(key, 0, tensors[key].view(-1))
    vocabulary = checkpoint.manifest.model_config.get("vocab_size")
    for key, tensor in tensors.items():
        ids = tensor[tensor != _IGNORED] if key == "labels" else tensor
        end = {"position_ids": tensor.shape[-1], "goes_on": 2}.get(key, vocabulary)
        if not ids.numel() or not isinstance(end, int):
            continue
        if not 0 <= int(ids.min()) <= int(ids.max()) < end:
            raise Unusable(f"{path} holds {key} outside the range 0 to {end - 1}")
    return tensors
