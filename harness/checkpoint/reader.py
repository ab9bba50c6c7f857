"""Reads the tensors of a checkpoint by element ranges, for any layout."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.checkpoint.index import WEIGHT, Entry, Index
from harness.checkpoint.tensor_file import TensorReader
from harness.errors import Unusable
from harness.layout.box import Overlap, Part, Piece, overlaps

_OPEN_FILES = 200  # of at most 1,024 per process; another layout may need the files of all ranks


class Reader:
    """Reads any elements of any tensor of a checkpoint, regardless of the layout that wrote it."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._open: dict[str, TensorReader] = {}

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
