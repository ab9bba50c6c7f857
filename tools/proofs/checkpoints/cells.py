"""The round trips: precisions, architectures, and the layouts on both of their sides."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

from tools.proofs.cells import Divided, Sizes, covering
from tools.proofs.models import DROPOUT, EVERYWHERE, FROZEN, WIDE

_STAGED = ("pipe2_zero0", "pipe2_zero1")
_BF16_SUMS = ("zero1_bf16_sums", "zero3_bf16_sums")
LAYOUTS = (
    *("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"),
    "zeropp",  # its second copy of the weights must not be left behind by what is loaded
    "zero3_default",
    *_STAGED,
    *_BF16_SUMS,
)
# Go on where they stopped; between them and the others a checkpoint is rounded.
BF16_STATES = ("zero2_bf16_states", "zero3_bf16_states")
PRECISIONS = ("fp32", "bf16", "fp16")
_SIZES = Sizes(bucket=4096, live=20_000, sub_group=20_000, persistence=0)
# The first step overflows; the scale is doubled again between save and end.
_SCALING = {"initial_scale_power": 32, "hysteresis": 1, "loss_scale_window": 3}


@dataclass(frozen=True)
class Side(Divided):
    """One side of a round trip: a layout on a number of ranks."""

    layout: str
    ranks: int
    accumulation: ClassVar[int] = 2

    @property
    def name(self) -> str:
        """How tables and files call it."""
        return f"{self.layout}x{self.ranks}"

    def deepspeed(self, precision: str) -> dict[str, Any]:
        """The DeepSpeed JSON, before it is resolved; at stage 1 fp32 sums are BF16_Optimizer."""
        return self.how.json(self.how.full_precision(precision), _SIZES, _SCALING)

    def sound(self, precision: str) -> bool:
        """Return True if it trains correctly in `precision`: see tools/proofs/parity/cells.py."""
        if self.layout in _BF16_SUMS:
            return precision == "bf16"
        if self.layout in ("zero0", "zeropp"):
            return precision == "fp32"  # of zeropp enough: it cuts and keeps what zero3 does
        return self.layout != "pipe2_zero0" or precision != "fp16"


@dataclass(frozen=True)
class Cell:
    """One round trip: saved by `source`, loaded and saved again by `target`."""

    precision: str
    architecture: str
    source: Side
    target: Side

    @property
    def name(self) -> str:
        """How tables and files call it."""
        sides = f"{self.source.name}-{self.target.name}"
        return f"{self.precision}-{self.architecture}-{sides}"

    @property
    def same(self) -> bool:
        """True if nothing changes: then the losses have to be bit-equal."""
        return self.source == self.target


def sides(precision: str) -> list[Side]:
    """All that train right; in 16 bits on one rank only what is cut otherwise there."""
    alone = LAYOUTS if precision == "fp32" else ("zero1", "zero3")
    every = [
        Side(layout, ranks)
        for layout, ranks in itertools.product(LAYOUTS, (1, 2))
        if ranks == 2 or (layout in alone and layout not in (*_STAGED, "zeropp"))
    ]
    return [side for side in every if side.sound(precision)]


def all_cells() -> list[Cell]:
    """A tied Llama between all layouts; the others where they may differ from it."""
    few = [Side("zero1", 2), Side("zero3", 2), Side("pipe2_zero1", 2), Side("zero3", 1)]
    cells = []
    for precision in PRECISIONS:
        every = sides(precision)
        pairs = list(itertools.product(every, every))
        cells += [Cell(precision, EVERYWHERE, *pair) for pair in pairs]
        around = [*zip(few, few, strict=True), *zip(few, few[1:] + few[:1], strict=True)]
        for architecture in ("llama", "mixtral", FROZEN):
            cells += [Cell(precision, architecture, *pair) for pair in around]
        if precision == "fp32":  # the second copy of what nobody trains
            cells.append(Cell(precision, FROZEN, few[0], Side("zeropp", 2)))
        if precision == "bf16":
            halves = [Side(layout, 2) for layout in BF16_STATES]
            cells += [Cell(precision, EVERYWHERE, side, side) for side in halves]
        # Another layout draws other masks.
        cells += [Cell(precision, DROPOUT, side, side) for side in every]
    return cells + [cell for precision in PRECISIONS for cell in nvme_cells(precision)]


def nvme_cells(precision: str) -> list[Cell]:
    """Optimizer states in files: gone on with, left, reached, on other ranks."""
    one, two = Side("zero3_nvme", 1), Side("zero3_nvme", 2)
    plain = Side("zero1", 2)
    pairs = ((two, two), (two, plain), (plain, two), (two, one))
    return [Cell(precision, WIDE, *pair) for pair in pairs]


def covering_cells() -> list[Cell]:
    """A small set that holds everything that `covers` names, without NVMe."""
    return covering([cell for cell in all_cells() if cell.architecture != WIDE], covers)


def covers(cell: Cell) -> set[tuple[Any, ...]]:
    """What a cell shows: every layout is left and reached in every precision, goes on alike in one,
    every architecture is there in fp32 and bf16, and every change of the number of ranks.
    """
    precision, source, target = cell.precision, cell.source, cell.target
    shown: set[tuple[Any, ...]] = {("architecture", cell.architecture)}
    if precision != "fp16":
        shown |= {("architecture", precision, cell.architecture)}
    if cell.same and source.layout in BF16_STATES:
        return shown | {("same", "bf16_states")}
    if cell.same:
        # zeropp goes on as zero3 does.
        return shown | {("same", source.layout)} - {("same", "zeropp")}
    shown |= {("ranks", source.ranks, target.ranks)}
    if target.layout == "zeropp":
        shown |= {("second copy", cell.architecture == FROZEN)} - {("second copy", False)}
    if source.layout == target.layout:
        return shown
    return shown | {("from", precision, source.layout), ("to", precision, target.layout)}
