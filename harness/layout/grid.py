"""Place of a rank: global rank <-> (pipeline, data, sequence, tensor) coordinates.

Pipeline is the outermost axis and tensor the innermost, so that the ranks that talk most are
neighbours on one node.  This is the order of DeepSpeed's `PipeModelDataParallelTopology` (axes
pipe, data, model), with sequence parallelism, which DeepSpeed lays over consecutive ranks, between
data and tensor.  Whoever asks "which part is mine, and with whom do I talk" (data, engine,
checkpoint, estimator) asks share.py, which knows what the axes mean.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

Axis = Literal["pipeline", "data", "sequence", "tensor"]
# "expert": among the ranks that hold all experts between them; "experts": which of their groups.
Place = Axis | Literal["expert", "experts"]


@dataclass(frozen=True)
class Coords:
    """One rank's place on every axis, each counted from 0."""

    pipeline: int
    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """`world_size` ranks as a box: pipeline x data x sequence x tensor.

    Experts are no axis of their own: `expert` neighbours on the line of data x sequence ranks hold
    all of them between them, and the next ones the same again.
    Raises ValueError when a size is below 1, the three sizes do not divide `world_size`, or
    `expert` not that line.
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
        """Data-parallel size: how many different micro-batches are read at a time."""
        return self.world_size // self._ranks_per_replica

    def coords(self, rank: int) -> Coords:
        """The coordinates of a global rank; IndexError when there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not one of {self.world_size} ranks")
        rest, tensor = divmod(rank, self.tensor)
        rest, sequence = divmod(rest, self.sequence)
        pipeline, data = divmod(rest, self.data)
        return Coords(pipeline=pipeline, data=data, sequence=sequence, tensor=tensor)

    def place(self, axis: Place, rank: int) -> int:
        """The coordinate of a global rank on an axis, or among the holders of experts."""
        here = self.coords(rank)
        line = here.data * self.sequence + here.sequence
        if axis == "expert":
            return line % self.expert
        if axis == "experts":
            return line // self.expert
        place: int = getattr(here, axis)
        return place

    def described(self, rank: int) -> str:
        """Return a rank's place as text to follow its number, " (data 0, pipeline 1, tensor 1)"; ""
        if every rank is a data rank.
        """
        axes: tuple[Place, ...] = ("pipeline", "sequence", "tensor", "expert")
        divided = [axis for axis in axes if getattr(self, axis) > 1]
        if not divided:
            return ""
        return f" ({', '.join(f'{axis} {self.place(axis, rank)}' for axis in ('data', *divided))})"

    def rank(self, coords: Coords) -> int:
        """The global rank at these coordinates; the inverse of `coords`."""
        outer = coords.pipeline * self.data + coords.data
        return (outer * self.sequence + coords.sequence) * self.tensor + coords.tensor

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, itself included, ascending."""
        here = self.coords(rank)
        return tuple(
            self.rank(replace(here, **{axis: place})) for place in range(getattr(self, axis))
        )

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Every group along `axis`, ordered by first rank: what `new_group` is called with."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.world_size)}))

    def alike(self, axes: Collection[Place]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that are at the same place on all of `axes`, ordered by first
        rank.
        """
        return _alike(self, tuple(axes))


def axes_json(
    pipeline: int = 1, tensor: int = 1, sequence: int = 1, expert: int = 1
) -> dict[str, Any]:
    """Return the keys of the DeepSpeed JSON that divide ranks so; none for an axis of one rank."""
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
