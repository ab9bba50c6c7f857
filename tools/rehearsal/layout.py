"""Reduces the ranks of a large job to a small layout of the same kind for this machine."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import ConfigError
from harness.layout.grid import Grid

MOST_RANKS = 4  # unless there are more pipeline stages than two data ranks leave room for


@dataclass(frozen=True)
class Layout:
    """Ranks of a rehearsal: pipeline stages x data ranks."""

    stages: int
    data: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.stages * self.data

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{ranks} = {self.stages} stages x {self.data} data" if self.stages > 1 else ranks


def rehearsed(real: Grid, wanted: int | None = None) -> Layout:
    """The layout that a job of `real` is rehearsed in; with `wanted` ranks where that is given.

    All pipeline stages stay. Data ranks go: down to MOST_RANKS ranks, but never below two where
    the job has two, for whatever is exchanged between them. So 64 GPUs are 4 ranks, in 2 stages
    2 x 2 and in 4 stages 4 x 2. Raises ConfigError for a number that is no such layout.
    """
    stages = real.pipeline
    if wanted is None:
        return Layout(stages, min(real.data, max(2, MOST_RANKS // stages)))
    if wanted < 1 or wanted % stages or wanted > real.world_size:
        legal = [str(n * stages) for n in range(1, real.data + 1)]
        shown = f"1 to {legal[-1]}" if stages == 1 < real.data else ", ".join(legal[:4])
        pipelined = f" in {stages} pipeline stages" if stages > 1 else ""
        raise ConfigError(
            f"--ranks is {wanted}: a job of --gpus {real.world_size}{pipelined} is rehearsed on "
            f"{shown}"
        )
    return Layout(stages, wanted // stages)


def elsewhere(layout: Layout, micro_batch: int, grad_accum: int) -> tuple[Layout, int] | None:
    """Another layout that the same global batch divides over, and its micro-batch.

    Half the data ranks; where there is one, half the stages; where there is one, two ranks. The
    micro-batch stays where it can, since a balancing loss of experts is not linear in it. None
    where a step is one sample, which only one rank can take.
    """
    stages, data = layout.stages, layout.data
    if data > 1:
        return Layout(stages, 1 if data % 2 else data // 2), micro_batch
    if stages > 1:
        return Layout(1 if stages % 2 else stages // 2, 1), micro_batch
    if grad_accum % 2 == 0:
        return Layout(1, 2), micro_batch
    if micro_batch % 2 == 0:
        return Layout(1, 2), micro_batch // 2
    return None
