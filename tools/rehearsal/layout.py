"""Reduces the ranks of a large job to a small layout of the same kind for this machine."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import ConfigError
from harness.layout.grid import Grid

MOST_RANKS = 4  # unless there are more pipeline stages than two data ranks leave room for


@dataclass(frozen=True)
class Layout:
    """Ranks of a rehearsal: pipeline stages x data x sequence x tensor ranks."""

    stages: int
    data: int
    tensor: int = 1
    sequence: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.stages * self.data * self.tensor * self.sequence

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        product = grid_product(Grid(self.ranks, self.stages, self.tensor, self.sequence))
        return f"{ranks} = {product}" if product else ranks


def grid_product(grid: Grid) -> str:
    """Return a grid as "2 stages x 4 data x 2 tensor"; "" if it has data ranks alone."""
    if grid.world_size == grid.data:
        return ""
    sizes = {"stages": grid.pipeline, "data": grid.data}
    sizes |= {"sequence": grid.sequence, "tensor": grid.tensor}
    return " x ".join(f"{n} {name}" for name, n in sizes.items() if n > 1 or name == "data")


def rehearsed(real: Grid, wanted: int | None = None) -> Layout:
    """The layout that a job of `real` is rehearsed in; with `wanted` ranks where that is given.

    All pipeline stages stay, and two tensor or sequence ranks of more. Data ranks go: down to
    MOST_RANKS ranks, but never below two where the job has two, for whatever is exchanged between
    them. So 64 GPUs are 4 ranks, in 2 stages 2 x 2 and in 4 stages 4 x 2. Raises ConfigError for a
    number that is no such layout.
    """
    stages, tensor, sequence = real.pipeline, min(real.tensor, 2), min(real.sequence, 2)
    each = stages * tensor * sequence
    if wanted is None:
        return Layout(stages, min(real.data, max(2, MOST_RANKS // each)), tensor, sequence)
    if wanted < 1 or wanted % each or wanted // each > real.data:
        legal = [str(n * each) for n in range(1, real.data + 1)]
        shown = f"1 to {legal[-1]}" if each == 1 < real.data else ", ".join(legal[:4])
        divided = [f"{stages} pipeline stages"] * (stages > 1)
        divided += [f"{sequence} sequence ranks"] * (sequence > 1)
        divided += [f"{tensor} tensor ranks"] * (tensor > 1)
        within = f" in {' x '.join(divided)}" if divided else ""
        raise ConfigError(
            f"--ranks is {wanted}: a job of --gpus {real.world_size}{within} is rehearsed on "
            f"{shown}"
        )
    return Layout(stages, wanted // each, tensor, sequence)


def elsewhere(layout: Layout, micro_batch: int, grad_accum: int) -> tuple[Layout, int] | None:
    """Another layout that the same global batch divides over, and its micro-batch.

    Undivided tensors and rows; where they are, half the data ranks; where there is one, half the
    stages; where there is one, two ranks. The micro-batch stays where it can, since a balancing
    loss of experts is not linear in it. None where a step is one sample, which only one rank can
    take.
    """
    stages, data = layout.stages, layout.data
    if layout.tensor * layout.sequence > 1:
        return Layout(stages, data), micro_batch
    if data > 1:
        return Layout(stages, 1 if data % 2 else data // 2), micro_batch
    if stages > 1:
        return Layout(1 if stages % 2 else stages // 2, 1), micro_batch
    if grad_accum % 2 == 0:
        return Layout(1, 2), micro_batch
    if micro_batch % 2 == 0:
        return Layout(1, 2), micro_batch // 2
    return None
