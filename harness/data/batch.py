"""One micro-batch as tensors, with its document bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from harness.layout.attention_table import ATTENTIONS


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on `device`, copied without waiting: pageable memory is pinned first."""
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # a no-op if already pinned


@dataclass(frozen=True)
class Bounds:
    """Document bounds of a batch whose rows are concatenated.

    Computed on the CPU with the batch: reading them from the device would stall every layer.
    """

    places: torch.Tensor
    """(documents + 1,) int32: first token of each document, then the end of the last."""
    longest: int
    """Length of the longest document, in tokens."""

    @classmethod
    def of(cls, like: torch.Tensor, position_ids: torch.Tensor | None) -> Bounds:
        """Return the document bounds of a batch; without position_ids, each row is one document."""
        starts = torch.arange(0, like.numel(), like.shape[-1])
        if position_ids is not None:  # each row and each document starts at position 0
            # Padding counts as a document: its positions start at 1 (data/packed_documents.py).
            follows = position_ids.flatten().diff() == 1
            starts = torch.nonzero(functional.pad(~follows, (1, 0), value=True))[:, 0]
        places = torch.cat([starts, torch.tensor([like.numel()])])
        return cls(places.to(torch.int32), int(places.diff().max()))

    def pinned(self) -> Bounds:
        """Return a copy in pinned memory."""
        return Bounds(self.places.pin_memory(), self.longest)

    def keywords(self, device: torch.device) -> dict[str, Any]:
        """Return the bounds as keyword arguments of transformers' attention functions."""
        places = on_device(self.places, device)
        sides = {"cu_seq_lens": places, "max_length": self.longest}
        return {f"{name}_{side}": value for name, value in sides.items() for side in "qk"}


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the CPU. Tensors are (micro_batch, seq_len) int64 unless noted."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    """Already shifted: labels[i] is the target at position i, or -100."""
    position_ids: torch.Tensor | None
    """Positions from 0 within each document if attention stays within it; otherwise None."""
    bounds: Bounds = None  # type: ignore[assignment]
    """Bounds of the documents, or of the rows; derived from the tensors above."""
    sources: torch.Tensor | None = None
    """(micro_batch,) int64: index of each sample's source in a mixture; None without a mixture."""
    windows: torch.Tensor | None = None
    """(micro_batch,) int64: index of each sample's window in the text if state is carried from
    window to window; otherwise None."""
    goes_on: torch.Tensor | None = None
    """(micro_batch,) bool: the window starts inside a document; None without carried state."""
    segments: torch.Tensor | None = None
    """For preference pairs: 2 * pair for tokens of the chosen side, 2 * pair + 1 for the rejected
    one's, -1 for padding; otherwise None."""
    reference: torch.Tensor | None = None
    """(pairs, 2) fp32: log-probabilities of both sides under the initial weights; None while they
    are not known."""

    def __post_init__(self) -> None:
        if self.bounds is None:
            bounds = Bounds.of(self.input_ids, self.position_ids)
            object.__setattr__(self, "bounds", bounds)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of which both sides have a target."""
        assert self.segments is not None, "other batches count tokens"
        sides = self.segments[self.labels != -100].unique()
        return int((sides[:-1] + 1 == sides[1:]).logical_and(sides[:-1] % 2 == 0).sum())

    def cut(self, pieces: int) -> Batch:
        """Return the same tokens as `pieces` times as many sequences of 1/`pieces` the length.

        The result equals packing to the shorter length.
        """
        if pieces == 1:
            return self
        rows, positions = len(self.labels) * pieces, self.position_ids
        if positions is not None:
            # A document continued from the previous piece restarts at 0, its index in the piece. A
            # document that starts inside the piece has a smaller position there and keeps it.
            positions = positions.view(rows, -1)
            positions = torch.minimum(positions, torch.arange(positions.shape[1]))
        sources = None if self.sources is None else self.sources.repeat_interleave(pieces)
        ids, labels = self.input_ids.view(rows, -1), self.labels.view(rows, -1)
        return Batch(ids, labels, positions, sources=sources)

    def trimmed(self, length: int) -> Batch:
        """Return a copy with only the first `length` positions of each row."""
        positions = self.position_ids
        return Batch(
            self.input_ids[:, :length].contiguous(),
            self.labels[:, :length].contiguous(),
            None if positions is None else positions[:, :length].contiguous(),
            sources=self.sources,
            segments=None if self.segments is None else self.segments[:, :length].contiguous(),
            reference=self.reference,
        )

    def pinned(self) -> Batch:
        """Return a copy in pinned memory, which a device can copy asynchronously."""
        positions = self.position_ids
        return Batch(
            self.input_ids.pin_memory(),
            self.labels.pin_memory(),
            None if positions is None else positions.pin_memory(),
            self.bounds.pinned(),
            None if self.sources is None else self.sources.pin_memory(),
            self.windows,
            self.goes_on,
            None if self.segments is None else self.segments.pin_memory(),
            None if self.reference is None else self.reference.pin_memory(),
        )

    def keywords(self, attention: str, device: torch.device) -> dict[str, Any]:
        """Return the model's keyword arguments that pass document bounds to an attention
        implementation; empty if it takes a mask instead.
        """
        row = ATTENTIONS[attention]
        # The host loops over documents, so it must not wait for the device.
        where = device if row.is_exact else self.bounds.places.device
        return self.bounds.keywords(where) if row.takes_bounds else {}

    def buckets(self, buckets: int, length: int) -> torch.Tensor:
        """Return (micro_batch, seq_len) int64: the index of each token's position among `buckets`
        equal ranges of `length`. Positions count within a document if attention does.
        """
        positions = self.position_ids
        if positions is None:
            positions = torch.arange(self.labels.shape[1]).expand_as(self.labels)
        return (positions * buckets // length).clamp(max=buckets - 1)

    def sources_on(self, device: torch.device) -> torch.Tensor | None:
        """Return the source indices on a device, copied asynchronously."""
        return None if self.sources is None else on_device(self.sources, device)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return input_ids, labels and position_ids on a device, copied asynchronously.

        position_ids is None if each row is one document: a mask that separates nothing is slow.
        """
        positions = self.position_ids
        if positions is not None and (positions.diff(dim=1) == 1).all():
            positions = None
        return (
            on_device(self.input_ids, device),
            on_device(self.labels, device),
            None if positions is None else on_device(positions, device),
        )
