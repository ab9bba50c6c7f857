"""GPU memory that the driver reports beyond torch's: context, kernels, NCCL buffers.

driver.toml has the figures and their sources. All are intervals, because libraries load kernels on
demand and NCCL uses as many channels as it finds links.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from harness.estimate.memory_item import Interval
from harness.layout.grid import Grid

_MIB = 2**20
_UNKNOWN = "hopper"
"""Generation assumed if no GPU is named."""


@dataclass(frozen=True)
class Generation:
    """One table of driver.toml; sizes in MiB."""

    gpus: list[str]
    context: list[float]
    workspace: float
    first: list[float]
    more: list[float]
    source: str


_TABLES = tomllib.loads(Path(__file__).with_name("driver.toml").read_text(encoding="utf-8"))
GENERATIONS = {name: Generation(**table) for name, table in _TABLES.items()}


def generation_of(gpu: str | None) -> Generation:
    """Return the generation for a key of gpus.toml; Hopper if the key is None."""
    matching = (each for each in GENERATIONS.values() if gpu in each.gpus)
    return next(matching, GENERATIONS[_UNKNOWN])


def communicators(grid: Grid, secondary_ranks: int = 1) -> int:
    """Return the number of NCCL communicators of a rank.

    All ranks, and DeepSpeed's copy of that group (comm/torch.py); for stages the groups along and
    across the pipeline (runtime/pipe/topology.py); for every other axis a group and its complement.
    """
    if grid.world_size == 1:  # DeepSpeed's collectives run even for one rank
        return 1
    axes = 2 * (grid.pipeline > 1) + 2 * (grid.tensor > 1) + 2 * (grid.sequence > 1)
    return 2 + axes + 2 * (grid.expert > 1) + (secondary_ranks > 1)


def driver_bytes(grid: Grid, gpu: str | None, secondary_ranks: int = 1) -> Interval:
    """Return the bytes that a rank uses on its GPU outside torch's allocator."""
    kind, count = generation_of(gpu), communicators(grid, secondary_ranks)

    def total(end: int) -> int:
        groups = kind.first[end] + (count - 1) * kind.more[end]
        return int((kind.context[end] + groups) * _MIB)

    return Interval(total(0), total(1))
