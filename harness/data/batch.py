"""One micro-batch as tensors, with the bounds of its documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from harness.layout.attention_table import ATTENTIONS


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, copied asynchronously: from memory that is not page-locked, the
    host would wait for the device.
    """
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # itself where it is pinned


@dataclass(frozen=True)
class Bounds:
    """Bounds of the documents in a batch whose rows are laid end to end.

    Made on the CPU with the batch: a device would be waited for in every layer.
    """

    places: torch.Tensor
    """(documents + 1,) int32: the first token of each, and the end of the last."""
    longest: int
    """Tokens of the longest document."""

    @classmethod
    def of(cls, like: torch.Tensor, position_ids: torch.Tensor | None) -> Bounds:
        """Return those of a batch: a row without positions is one document."""
        starts = torch.arange(0, like.numel(), like.shape[-1])
        if position_ids is not None:  # every row begins with position 0, as every document does
            follows = position_ids.flatten().diff() == 1  # padding begins with 1 (data/whole.py)
            starts = torch.nonzero(functional.pad(~follows, (1, 0), value=True))[:, 0]
        places = torch.cat([starts, torch.tensor([like.numel()])])
        return cls(places.to(torch.int32), int(places.diff().max()))

    def pinned(self) -> Bounds:
        """Return a copy in page-locked memory."""
        return Bounds(self.places.pin_memory(), self.longest)

    def keywords(self, device: torch.device) -> dict[str, Any]:
        """Return them as transformers' attention functions are given them."""
        places = on_device(self.places, device)
        sides = {"cu_seq_lens": places, "max_length": self.longest}
        return {f"{name}_{side}": value for name, value in sides.items() for side in "qk"}


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the CPU, (micro_batch, seq_len) int64 each."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    """Already shifted: labels[i] is the target of position i, or -100."""
    position_ids: torch.Tensor | None
    """Positions from 0 in each document if tokens attend only within it; otherwise None."""
    bounds: Bounds = None  # type: ignore[assignment]
    """Those of its documents, or of its rows; made of the above."""
    sources: torch.Tensor | None = None
    """(micro_batch,) int64: number of each sample's source in a mixture; None without."""
    windows: torch.Tensor | None = None
    """(micro_batch,) int64: number of each sample's window in the text, if states are carried from
    a window to the next one; otherwise None."""
    goes_on: torch.Tensor | None = None
    """(micro_batch,) bool: the window begins within a document; None as above."""

    def __post_init__(self) -> None:
        if self.bounds is None:
            bounds = Bounds.of(self.input_ids, self.position_ids)
            object.__setattr__(self, "bounds", bounds)

    def cut(self, pieces: int) -> Batch:
        """Return the same tokens as `pieces` times as many sequences, each shorter by that factor.

        Equals the batch that packing to the shorter length gives.
        """
        if pieces == 1:
            return self
        rows, positions = len(self.labels) * pieces, self.position_ids
        if positions is not None:
            # A document continued from the previous piece restarts at 0: its place in the piece.
            # A document that begins inside the piece has a smaller position there and keeps it.
            positions = positions.view(rows, -1)
            positions = torch.minimum(positions, torch.arange(positions.shape[1]))
        sources = None if self.sources is None else self.sources.repeat_interleave(pieces)
        ids, labels = self.input_ids.view(rows, -1), self.labels.view(rows, -1)
        return Batch(ids, labels, positions, sources=sources)

    def trimmed(self, length: int) -> Batch:
        """Return the first `length` positions of each row."""
        positions = self.position_ids
        return Batch(
            self.input_ids[:, :length].contiguous(),
            self.labels[:, :length].contiguous(),
            None if positions is None else positions[:, :length].contiguous(),
            sources=self.sources,
        )

    def pinned(self) -> Batch:
        """Return a copy in page-locked memory, from which a device can copy asynchronously."""
        positions = self.position_ids
        return Batch(
            self.input_ids.pin_memory(),
            self.labels.pin_memory(),
            None if positions is None else positions.pin_memory(),
            self.bounds.pinned(),
            None if self.sources is None else self.sources.pin_memory(),
            self.windows,
            self.goes_on,
        )

    def keywords(self, attention: str, device: torch.device) -> dict[str, Any]:
        """Return the model's arguments in which an attention implementation finds the documents;
        none for one that takes a mask.
        """
        row = ATTENTIONS[attention]
        # Pieces are walked through by the host, which does not wait for the device.
        where = device if row.is_exact else self.bounds.places.device
        return self.bounds.keywords(where) if row.takes_bounds else {}

    def buckets(self, buckets: int, length: int) -> torch.Tensor:
        """Return (micro_batch, seq_len) int64: in which of so many equal ranges of `length`
        positions each token is, counted in its document where tokens attend only within it.
        """
        positions = self.position_ids
        if positions is None:
            positions = torch.arange(self.labels.shape[1]).expand_as(self.labels)
        return (positions * buckets // length).clamp(max=buckets - 1)

    def sources_on(self, device: torch.device) -> torch.Tensor | None:
        """Return the sources on a device, copied asynchronously."""
        return None if self.sources is None else on_device(self.sources, device)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the three tensors on a device, copied asynchronously.

        No positions if each row is one document: masks that separate nothing are slow.
        """
        positions = self.position_ids
        if positions is not None and (positions.diff(dim=1) == 1).all():
            positions = None
        return (
            on_device(self.input_ids, device),
            on_device(self.labels, device),
            None if positions is None else on_device(positions, device),
        )
