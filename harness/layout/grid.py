"""The position of a rank in the grid, and its share of tokens and of every parameter.

Pipeline is the outermost axis and tensor the innermost, so that the ranks that communicate most are
neighbours on one node. This is the order of DeepSpeed's `PipeModelDataParallelTopology` (axes pipe,
data, model), with sequence parallelism, which DeepSpeed maps to consecutive ranks, between data and
tensor.

Data, engine, checkpoints and estimator ask a Share for their slice and their group by purpose,
never by axis. To add an axis, add a row to GROUPS, and an entry to a Share's `cutters` if the axis
slices parameters.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from harness.layout.box import Part, Range, share_of

Axis = Literal["pipeline", "data", "sequence", "tensor"]
# "expert": index among the ranks that together hold all experts; "experts": index of that group.
Place = Axis | Literal["expert", "experts"]


@dataclass(frozen=True)
class Coords:
    """A rank's position on every axis, each counted from 0."""

    pipeline: int
    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """`world_size` ranks as a box: pipeline x data x sequence x tensor.

    Expert parallelism is not a separate axis: on the line of data x sequence ranks, each group of
    `expert` neighbours together holds all experts.

    Raises ValueError if a size is below 1, if pipeline x tensor x sequence does not divide
    `world_size`, or if `expert` does not divide data x sequence.
    """

    world_size: int
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "pipeline", "tensor", "sequence", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.world_size % self._ranks_per_replica:
            ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
            raise ValueError(
                f"{ranks} cannot be split into pipeline {self.pipeline} x tensor {self.tensor} x "
                f"sequence {self.sequence} = {self._ranks_per_replica}: the number of ranks must "
                f"be a multiple of it: use {_either(*self._nearest_worlds)} ranks, or sizes with a "
                f"product of {_either(*self._nearest_products)}"
            )
        if self.data * self.sequence % self.expert:
            raise ValueError(
                f"{self.data * self.sequence} data ranks cannot hold their experts in groups of "
                f"{self.expert}"
            )

    @property
    def _ranks_per_replica(self) -> int:
        return self.pipeline * self.tensor * self.sequence

    @property
    def _nearest_worlds(self) -> list[int]:
        below = self.world_size // self._ranks_per_replica * self._ranks_per_replica
        return [below, below + self._ranks_per_replica] if below else [self._ranks_per_replica]

    @property
    def _nearest_products(self) -> list[int]:
        legal = [n for n in range(1, self.world_size + 1) if not self.world_size % n]
        below = [n for n in legal if n < self._ranks_per_replica]
        return [*below[-1:], *legal[len(below) :][:1]]

    @property
    def data(self) -> int:
        """Data-parallel size: the number of micro-batches that are read at a time."""
        return self.world_size // self._ranks_per_replica

    def coords(self, rank: int) -> Coords:
        """Return the coordinates of a global rank. Raises IndexError if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not one of {self.world_size} ranks")
        rest, tensor = divmod(rank, self.tensor)
        rest, sequence = divmod(rest, self.sequence)
        pipeline, data = divmod(rest, self.data)
        return Coords(pipeline=pipeline, data=data, sequence=sequence, tensor=tensor)

    def place(self, axis: Place, rank: int) -> int:
        """Return a rank's coordinate on an axis, or its index for expert parallelism."""
        here = self.coords(rank)
        line = here.data * self.sequence + here.sequence
        if axis == "expert":
            return line % self.expert
        if axis == "experts":
            return line // self.expert
        place: int = getattr(here, axis)
        return place

    def described(self, rank: int) -> str:
        """Return " (data 0, pipeline 1, tensor 1)"; "" if every rank is a data rank."""
        axes: tuple[Place, ...] = ("pipeline", "sequence", "tensor", "expert")
        divided = [axis for axis in axes if getattr(self, axis) > 1]
        if not divided:
            return ""
        return f" ({', '.join(f'{axis} {self.place(axis, rank)}' for axis in ('data', *divided))})"

    def rank(self, coords: Coords) -> int:
        """Return the global rank at these coordinates; the inverse of `coords`."""
        outer = coords.pipeline * self.data + coords.data
        return (outer * self.sequence + coords.sequence) * self.tensor + coords.tensor

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axis`, with itself, ascending."""
        coords = self.coords(rank)
        return tuple(
            self.rank(replace(coords, **{axis: place})) for place in range(getattr(self, axis))
        )

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return every group along `axis`, ordered by first rank."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.world_size)}))

    def alike(self, axes: Collection[Place]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks with equal positions on all of `axes`, by first rank."""
        return _alike(self, tuple(axes))


def axes_json(
    pipeline: int = 1, tensor: int = 1, sequence: int = 1, expert: int = 1
) -> dict[str, Any]:
    """Return the DeepSpeed JSON keys for these sizes; an axis of size 1 is omitted."""
    keys = {
        "pipeline": (pipeline, {"stages": pipeline}),
        "tensor_parallel": (tensor, {"autotp_size": tensor}),
        "sequence_parallel_size": (sequence, sequence),
        "expert_parallel": (expert, {"enabled": True, "autoep_size": expert}),
    }
    return {key: value for key, (size, value) in keys.items() if size > 1}


def _either(*numbers: int) -> str:
    return " or ".join(map(str, numbers))


@cache
def _alike(grid: Grid, axes: tuple[Place, ...]) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(grid.world_size):
        groups.setdefault(tuple(grid.place(axis, rank) for axis in axes), []).append(rank)
    return tuple(map(tuple, groups.values()))


# cutter(name, shape, 2, 4) returns the ranges of each sliced dimension of a parameter at index 2 of
# 4 on an axis. Dimensions that are not sliced are omitted.
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

# The axes on which all ranks of a group have the same position; they differ on all others.
GROUPS: dict[Purpose, tuple[Place, ...]] = {
    # Sum the loss and its targets, which are the same on tensor-parallel ranks.
    "loss": ("tensor",),
    # Sum squared gradients if every rank has a shard of them.
    "norm": (),
    # Sum squared unsharded gradients: the ranks that together hold the model once.
    "model": ("data", "sequence"),
    # Hold the same layers.
    "stage": ("pipeline",),
    # Hold the tensor-parallel slices of the same weights.
    "tensor": ("pipeline", "data", "sequence"),
    # Compute the tokens of the same rows.
    "sequence": ("pipeline", "data", "tensor"),
    # Together hold all experts of a layer.
    "experts": ("pipeline", "experts", "tensor"),
    # Together hold all experts of a layer when tensor parallelism may also split their width.
    "expert_parts": ("pipeline", "experts"),
    # Hold equal weights, or shards of equal weights.
    "replicas": ("pipeline", "tensor"),
    # Hold equal experts, or shards of them.
    "expert_replicas": ("pipeline", "expert", "tensor"),
    # Read different samples.
    "data": ("pipeline", "sequence", "tensor"),
    # Draw the same dropout, because they share hidden states.
    "dropout": ("pipeline", "data", "sequence"),
}
# Ranks along these axes hold equal shards of a parameter that is not sliced; along others they hold
# different layers or different ZeRO shards.
_COPIED: tuple[Axis, ...] = ("tensor",)


def starts_of(data_rank: int, data_ranks: int, samples: int, micro_batch: int) -> range:
    """Return the first sample of each micro-batch of a data rank; ranks take them in turn."""
    together = micro_batch * data_ranks
    rounds = -(-samples // together)
    first = data_rank * micro_batch
    return range(first, first + rounds * together, together)


@dataclass(frozen=True)
class Share:
    """The share of `rank` in tokens and parameters. `cutters`: by axis, applied in order."""

    grid: Grid
    rank: int
    cutters: Mapping[Place, Cutter] = field(default_factory=dict)

    @property
    def data_rank(self) -> int:
        """Index of this rank among those that read different samples."""
        return self.grid.coords(self.rank).data

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different samples."""
        return self.grid.data

    def starts(self, samples: int, micro_batch: int) -> range:
        """Return the first sample of each of this rank's micro-batches of a global batch.

        All ranks get the same number of micro-batches; the last may start or end beyond `samples`.
        """
        return starts_of(self.data_rank, self.data_ranks, samples, micro_batch)

    def positions(self, seq_len: int) -> Range:
        """Return the range of each sample's tokens that this rank computes."""
        places = self.grid.sequence
        if seq_len % places:
            raise ValueError(f"{seq_len} tokens cannot be divided over {places} sequence ranks")
        ((start, stop),) = share_of(seq_len, self.grid.coords(self.rank).sequence, places)
        return start, stop

    @property
    def dropout_rank(self) -> int:
        """Rank used to seed dropout; equal on ranks that must draw the same dropout."""
        return self.ranks("dropout")[0]

    def ranks(self, purpose: Purpose) -> tuple[int, ...]:
        """Return this rank's group for a purpose, ascending."""
        return next(group for group in self.every(purpose) if self.rank in group)

    def every(self, purpose: Purpose) -> tuple[tuple[int, ...], ...]:
        """Return every rank's group for a purpose, by first rank. All ranks must create all."""
        return self.grid.alike(GROUPS[purpose])

    def part(self, name: str, shape: tuple[int, ...]) -> Part:
        """Return this rank's slice of a parameter of full `shape`, before ZeRO shards it."""
        part = Part.of(shape)
        for axis, cutter in self.cutters.items():
            place, places = self.grid.place(axis, self.rank), getattr(self.grid, axis)
            cuts = cutter(name, part.shape, place, places)
            for dimension, ranges in cuts.items():
                part = part.cut(dimension, ranges)
        return part

    def holders(self, name: str, shape: tuple[int, ...]) -> Purpose:
        """Return the purpose of the group that holds the same slice, or shards of it."""
        cutter = self.cutters.get("expert")
        is_divided = cutter is not None and cutter(name, shape, 0, self.grid.expert)
        return "expert_replicas" if is_divided else "replicas"

    def alike(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that hold the same slice of a parameter, or shards of it, ascending."""
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
        """Return True if this rank saves and counts a parameter: the first of those with equal
        copies.
        """
        peers = (rank for axis in _COPIED for rank in self.grid.group(axis, self.rank))
        earlier = [replace(self, rank=rank) for rank in peers if rank < self.rank]
        if not earlier:
            return True
        own = self.part(name, shape)
        return all(other.part(name, shape) != own for other in earlier)
