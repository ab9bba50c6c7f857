"""The tokens and the part of every parameter that one rank of a grid has, and its groups.

Whoever trains, saves, counts or compares asks here and names a purpose, never an axis.  A further
axis is a row in GROUPS, and an entry in a Share's `cutters` where it cuts parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.layout.box import Part, Range, share_of
from harness.layout.grid import Axis, Grid, Place

# The ranges of each dimension that a cut leaves to place 2 of 4 of an axis, given a parameter's
# name and shape: cutter(name, shape, 2, 4). Dimensions that are not cut are not there.
Cutter = Callable[[str, tuple[int, ...], int, int], Mapping[int, tuple[Range, ...]]]
Purpose = Literal[
    "loss",
    "norm",
    "model",
    "stage",
    "tensor",
    "sequence",
    "experts",
    "expert_parts",
    "replicas",
    "expert_replicas",
    "data",
    "dropout",
]

# The axes on which the ranks of a group are at one place; they differ on all others.
GROUPS: dict[Purpose, tuple[Place, ...]] = {
    # Sum the loss and count its targets: tensor-parallel ranks have the same ones.
    "loss": ("tensor",),
    # Add up squares of gradients of which every rank has a shard.
    "norm": (),
    # The same of whole gradients: the ranks that hold the model once between them.
    "model": ("data", "sequence"),
    # Hold the same layers: all of what no axis divides.
    "stage": ("pipeline",),
    # Hold the parts of one weight that tensor parallelism divides.
    "tensor": ("pipeline", "data", "sequence"),
    # Compute the tokens of one row.
    "sequence": ("pipeline", "data", "tensor"),
    # Hold all experts of a layer, each some of them.
    "experts": ("pipeline", "experts", "tensor"),
    # Hold the parts of all experts of a layer, whose width tensor parallelism may divide, too.
    "expert_parts": ("pipeline", "experts"),
    # Hold equal weights, or shards of them.
    "replicas": ("pipeline", "tensor"),
    # The same of experts.
    "expert_replicas": ("pipeline", "expert", "tensor"),
    # Read other samples.
    "data": ("pipeline", "sequence", "tensor"),
    # Draw the same dropout: it falls on hidden states that all of them have.
    "dropout": ("pipeline", "data", "sequence"),
}
# Ranks along these axes hold equal shards of a parameter that is not cut; along others they have
# other layers, or other shards of ZeRO.
_COPIED: tuple[Axis, ...] = ("tensor",)


def starts_of(data_rank: int, data_ranks: int, samples: int, micro_batch: int) -> range:
    """Return the first sample of each micro-batch of one data rank: they are dealt out in turn."""
    together = micro_batch * data_ranks
    rounds = -(-samples // together)
    first = data_rank * micro_batch
    return range(first, first + rounds * together, together)


@dataclass(frozen=True)
class Share:
    """The share of `rank` in everything. `cutters`: by axis, in the order in which they cut."""

    grid: Grid
    rank: int
    cutters: Mapping[Place, Cutter] = field(default_factory=dict)

    @property
    def data_rank(self) -> int:
        """Number of this rank among those that read other samples."""
        return self.grid.coords(self.rank).data

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read other samples at a time, this one included."""
        return self.grid.data

    def starts(self, samples: int, micro_batch: int) -> range:
        """Return the first sample of each micro-batch that this rank reads of `samples`, from 0.

        All ranks read equally many: the last may begin, or end, beyond the samples.
        """
        return starts_of(self.data_rank, self.data_ranks, samples, micro_batch)

    def positions(self, seq_len: int) -> Range:
        """Return the range of tokens that it computes of each of its samples."""
        places = self.grid.sequence
        if seq_len % places:
            raise ValueError(f"{seq_len} tokens cannot be divided over {places} sequence ranks")
        ((start, stop),) = share_of(seq_len, self.grid.coords(self.rank).sequence, places)
        return start, stop

    @property
    def dropout_rank(self) -> int:
        """Return the rank in whose name dropout is drawn: it is drawn alike by those of a name."""
        return self.ranks("dropout")[0]

    def ranks(self, purpose: Purpose) -> tuple[int, ...]:
        """Return this rank's group for a purpose, ascending."""
        return next(group for group in self.every(purpose) if self.rank in group)

    def every(self, purpose: Purpose) -> tuple[tuple[int, ...], ...]:
        """Return the groups of all ranks for a purpose, ordered by first rank: all make all."""
        return self.grid.alike(GROUPS[purpose])

    def part(self, name: str, shape: tuple[int, ...]) -> Part:
        """Return what this rank holds of a parameter of the whole `shape`, ZeRO's shards put
        together.
        """
        part = Part.of(shape)
        for axis, cutter in self.cutters.items():
            place, places = self.grid.place(axis, self.rank), getattr(self.grid, axis)
            cuts = cutter(name, part.shape, place, places)
            for dimension, ranges in cuts.items():
                part = part.cut(dimension, ranges)
        return part

    def holders(self, name: str, shape: tuple[int, ...]) -> Purpose:
        """Return the purpose of the group that holds the same of a parameter, or shards of it."""
        cutter = self.cutters.get("expert")
        is_divided = cutter is not None and cutter(name, shape, 0, self.grid.expert)
        return "expert_replicas" if is_divided else "replicas"

    def alike(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that hold the same of a parameter, or shards of it, ascending."""
        own, by_places = self.part(name, shape), dict[tuple[int, ...], bool]()
        ranks = []
        for rank in self.ranks("stage"):
            places = tuple(self.grid.place(axis, rank) for axis in self.cutters)
            if places not in by_places:
                by_places[places] = replace(self, rank=rank).part(name, shape) == own
            if by_places[places]:
                ranks.append(rank)
        return tuple(ranks)

    def is_first(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether it is this rank, of those that hold the same of a parameter beside ZeRO's
        shards, that saves it and counts it in the norm.
        """
        peers = (rank for axis in _COPIED for rank in self.grid.group(axis, self.rank))
        earlier = [replace(self, rank=rank) for rank in peers if rank < self.rank]
        if not earlier:
            return True
        own = self.part(name, shape)
        return all(other.part(name, shape) != own for other in earlier)
