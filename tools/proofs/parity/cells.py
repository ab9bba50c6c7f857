"""The cells that the parity gate compares."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tools.proofs.cells import LAYOUTS, Divided, Sizes, covering
from tools.proofs.models import FLAT, NOT_IN_FP16, PIPELINED, PRESETS, WIDE

STEPS = 20
ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""Layouts that are compared with every other value."""
FEW = ("zeropp", "zero2_bf16_states", "zero3_bf16_states", "compiled_zero3", "compiled_zero1")
"""Layouts in few combinations, a kind of them by itself in the covering set."""
NVME = ("zero3_nvme",)
"""Layouts that are not in the covering set."""
STAGES = tuple(f"pipe{n}_zero{stage}" for n in (2, 4) for stage in (0, 1))
# Where several cells cover equally many pairs, the covering set takes the first.
PRECISIONS = ("fp32", "bf16", "fp16")
ACCUMULATIONS = (1, 4)
RANKS = (2, 1)
_SIZES = Sizes(bucket=4096, live=20_000, sub_group=20_000, persistence=64)


@dataclass(frozen=True)
class Cell(Divided):
    """One combination; `accumulation` is micro-batches per rank and optimizer step."""

    architecture: str
    layout: str
    precision: str
    accumulation: int
    ranks: int

    @property
    def name(self) -> str:
        """How tables and files call it."""
        return "-".join(str(value) for value in asdict(self).values())

    @property
    def sums(self) -> str:
        """The precision in which a rank adds up the gradients of its micro-batches."""
        return self.how.sums_of(self.precision)

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed JSON of this cell, before it is resolved."""
        precision = self.how.full_precision(self.precision)
        return self.how.json(precision, _SIZES, {"initial_scale_power": 12})


@dataclass(frozen=True)
class Job:
    """A cell to train into a folder, with a defect planted or none."""

    cell: Cell
    defect: str | None = None
    folder: str = "."

    @property
    def label(self) -> str:
        """What a terminal shows of it."""
        return f"trained {self.cell.name}" + (f" with {self.defect}" if self.defect else "")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Return what `asdict` gave as JSON."""
        return cls(**{**values, "cell": Cell(**values["cell"])})


def all_cells() -> list[Cell]:
    """Every combination."""
    values = (FLAT, ZERO, PRECISIONS, ACCUMULATIONS, RANKS)
    cells = [Cell(*combination) for combination in itertools.product(*values)]
    return cells + preset_cells() + few_cells(FLAT) + nvme_cells() + pipeline_cells()


def nvme_cells() -> list[Cell]:
    """Optimizer states in files, in every precision, on one and on two ranks."""
    return [
        Cell(WIDE, layout, precision, 2, ranks)
        for layout, precision, ranks in itertools.product(NVME, PRECISIONS, RANKS)
    ]


def few_cells(architectures: Sequence[str]) -> list[Cell]:
    """FEW layouts with every architecture and precision, two micro-batches on each of four ranks;
    on two where only the states are other than in ZERO.
    """
    combinations = itertools.product(FEW, architectures, PRECISIONS)
    cells = [Cell(name, layout, precision, 2, 4) for layout, name, precision in combinations]
    halves = [replace(cell, ranks=2) for cell in cells if cell.how.has_bf16_states]
    whole = [cell for cell in cells if not cell.how.has_bf16_states]
    return whole + [cell for cell in halves if cell.precision == "bf16"]


def preset_cells() -> list[Cell]:
    """The presets' other architectures under every layout that has no stages, ZeRO-2 first."""
    layouts = dict.fromkeys(("zero2", *ZERO))
    return [
        Cell(architecture, layout, precision, ACCUMULATIONS[-1], RANKS[0])
        for architecture, layout, precision in itertools.product(PRESETS, layouts, PRECISIONS)
        if precision != "fp16" or architecture not in NOT_IN_FP16
    ]


def pipeline_cells() -> list[Cell]:
    """Every pipelined combination: as many micro-batches as stages and twice that; 2 x 2 ranks."""
    cells = []
    for architecture, layout, precision in itertools.product(PIPELINED, STAGES, PRECISIONS):
        if precision == "fp16" and architecture in NOT_IN_FP16:
            continue
        stages = LAYOUTS[layout].pipeline
        for accumulation in (stages, 2 * stages):
            cells.append(Cell(architecture, layout, precision, accumulation, stages))
        if stages == 2:
            cells.append(Cell(architecture, layout, precision, stages, 2 * stages))
    return cells


def covering_cells() -> list[Cell]:
    """A small set in which every pair of values that can occur together does occur; of pipelined
    cells and of PRESETS an architecture counts by itself, as does a layout of FEW: in pairs it
    would take dozens more.
    """
    return covering([cell for cell in all_cells() if cell.layout not in NVME], _covers)


def _covers(cell: Cell) -> set[tuple[tuple[str, Any], ...]]:
    values: dict[str, Any] = asdict(cell)
    if cell.layout in FEW:
        kind = "bf16_states" if cell.how.has_bf16_states else cell.layout.partition("_zero")[0]
        return {(("layout", kind),)}
    alone = set()
    if cell.layout in STAGES or cell.architecture in PRESETS:
        alone = {(("architecture", values.pop("architecture")),)}
    return alone | set(itertools.combinations(values.items(), 2))
