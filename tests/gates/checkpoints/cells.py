"""The round trips: precisions, architectures, and the layouts of their source and target."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch

from tests.gates.cells import Divided, Sizes, covering
from tests.gates.models import DROPOUT, EVERYWHERE, FROZEN, MIXTURE, SHARED, WIDE

# A matrix that is partitioned, and a vector that ZeRO 3 may keep whole.
FROZEN_WEIGHTS = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight")
BUFFERS = {"steps_seen": torch.tensor(7), "load": torch.tensor([0.25, -3.0, 1e-3, 5.0, 0.125])}
BLANK_SEED = 1
"""Seed of models to be loaded: their previous values appear nowhere in the checkpoint."""


@contextlib.contextmanager
def built_as(architecture: str) -> Iterator[None]:
    """Freeze parameters and register buffers of the architecture in engines built in the body."""
    if architecture != FROZEN:
        yield
        return
    from harness.engine import build, stages

    def frozen(plan: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(plan, *args, **kwargs)
        for name in FROZEN_WEIGHTS:
            model.get_parameter(name).requires_grad_(False)
        for name, value in BUFFERS.items():
            blank = plan.config.train.seed == BLANK_SEED
            model.model.layers[1].register_buffer(name, value * 0 if blank else value.clone())
        return model

    original = build.empty_model
    with (
        mock.patch.object(build, "empty_model", frozen),
        mock.patch.object(stages, "empty_model", frozen),
    ):
        yield


_STAGED = ("pipe2_zero0", "pipe2_zero1")
DIVIDED = ("tensor2_zero1", "tensor2_zero3")
ROWS = ("sequence2_zero1", "sequence2_zero3")
EXPERTS = ("expert2_zero1", "expert2_zero3")
NARROW_EXPERTS = "tensor2_expert2_zero3"
"""Divided by number and by width; only in the full table."""
DIVIDED_STAGES = ("pipe2_tensor2_zero0", "pipe2_tensor2_zero1")
_BF16_SUMS = ("zero1_bf16_sums", "zero3_bf16_sums")
LAYOUTS = (
    *("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"),
    "zeropp",  # loading must also update its second copy of the weights
    "zero3_default",
    *_STAGED,
    *_BF16_SUMS,
)
# They continue bit-equal only with themselves; between them and others a checkpoint is rounded.
BF16_STATES = ("zero2_bf16_states", "zero3_bf16_states")
PRECISIONS = ("fp32", "bf16", "fp16")
_SIZES = Sizes(bucket=4096, live=20_000, sub_group=20_000, persistence=0)
# The first step overflows; the scale is doubled again after the save.
_SCALING = {"initial_scale_power": 32, "hysteresis": 1, "loss_scale_window": 3}


@dataclass(frozen=True)
class Side(Divided):
    """One side of a round trip: a layout on a number of ranks."""

    layout: str
    ranks: int
    accumulation: ClassVar[int] = 2

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return f"{self.layout}x{self.ranks}"

    def deepspeed(self, precision: str) -> dict[str, Any]:
        """Return the unresolved DeepSpeed JSON; at stage 1, fp32 sums select BF16_Optimizer."""
        return self.how.json(self.how.full_precision(precision), _SIZES, _SCALING)

    def sound(self, precision: str) -> bool:
        """Return True if it trains correctly in `precision`: see tests/gates/parity/cells.py."""
        if self.layout in _BF16_SUMS:
            return precision == "bf16"
        if self.layout in ("zero0", "zeropp"):
            return precision == "fp32"  # enough for zeropp, which partitions as zero3 does
        return not (self.how.pipeline > 1 and self.how.stage == 0) or precision != "fp16"


@dataclass(frozen=True)
class Cell:
    """One round trip: saved by `source`, loaded and saved again by `target`."""

    precision: str
    architecture: str
    source: Side
    target: Side

    @property
    def name(self) -> str:
        """Name in tables and files."""
        sides = f"{self.source.name}-{self.target.name}"
        return f"{self.precision}-{self.architecture}-{sides}"

    @property
    def same(self) -> bool:
        """True if the layout does not change, so that losses must be bit-equal."""
        return self.source == self.target


def sides(precision: str) -> list[Side]:
    """Return all sides that train correctly; in 16 bits, only a few of them on one rank."""
    alone = LAYOUTS if precision == "fp32" else ("zero1", "zero3")
    every = [
        Side(layout, ranks)
        for layout, ranks in itertools.product(LAYOUTS, (1, 2))
        if ranks == 2 or (layout in alone and layout not in (*_STAGED, "zeropp"))
    ]
    return [side for side in every if side.sound(precision)]


def all_cells() -> list[Cell]:
    """Return all cells: a tied Llama between all layouts, other models where they may behave
    differently.
    """
    few = [Side("zero1", 2), Side("zero3", 2), Side("pipe2_zero1", 2), Side("zero3", 1)]
    cells = []
    for precision in PRECISIONS:
        every = sides(precision)
        pairs = list(itertools.product(every, every))
        cells += [Cell(precision, EVERYWHERE, *pair) for pair in pairs]
        around = [*zip(few, few, strict=True), *zip(few, few[1:] + few[:1], strict=True)]
        for architecture in ("llama", "mixtral", FROZEN):
            cells += [Cell(precision, architecture, *pair) for pair in around]
        if precision == "fp32":  # the second copy of untrained parameters
            cells.append(Cell(precision, FROZEN, few[0], Side("zeropp", 2)))
        if precision == "bf16":
            halves = [Side(layout, 2) for layout in BF16_STATES]
            cells += [Cell(precision, EVERYWHERE, side, side) for side in halves]
        divided = [Side(layout, 2) for layout in DIVIDED]
        pairs = list(itertools.product([*divided, *few], repeat=2))
        cells += [Cell(precision, SHARED, *pair) for pair in pairs if {*divided} & {*pair}]
        cells += divided_stage_cells(precision) + expert_cells(precision) + row_cells(precision)
        # Another layout draws other masks.
        cells += [Cell(precision, DROPOUT, side, side) for side in every]
    return cells + [cell for precision in PRECISIONS for cell in nvme_cells(precision)]


def divided_stage_cells(precision: str) -> list[Cell]:
    """Return cells of stages with tensor parallelism on four and eight ranks: resumed unchanged,
    left for other layouts, and reached from them.
    """
    staged = [Side(layout, 4) for layout in DIVIDED_STAGES]
    staged = [side for side in staged if side.sound(precision)] + [Side(DIVIDED_STAGES[1], 8)]
    others = [Side("zero3", 2), Side("zero1", 1), Side("pipe2_zero1", 2), Side("tensor2_zero3", 2)]
    pairs = list(itertools.product(staged, repeat=2))
    for pair in itertools.product(staged, others):
        pairs += [pair, pair[::-1]]
    return [Cell(precision, SHARED, *pair) for pair in pairs]


def row_cells(precision: str) -> list[Cell]:
    """Return cells of sequence parallelism, whose ranks share ZeRO's states: resumed unchanged,
    left for other layouts, and reached from them.
    """
    first, last = (Side(layout, 2) for layout in ROWS)
    pairs = [(first, first), (last, last)]
    for there, here in (
        (first, Side("zero3", 2)),
        (last, Side("zero1", 1)),
        (last, Side(DIVIDED[0], 2)),
    ):
        pairs += [(there, here), (here, there)]
    return [Cell(precision, SHARED, *pair) for pair in pairs]


def expert_cells(precision: str) -> list[Cell]:
    """Return cells of expert parallelism on two and four ranks: resumed unchanged, left for other
    layouts, and reached from them.
    """
    divided = [Side(layout, ranks) for layout in EXPERTS for ranks in (2, 4)]
    others = [Side("zero3", 2), Side("zero1", 1), Side("pipe2_zero1", 2), Side("tensor2_zero3", 2)]
    pairs = list(itertools.product(divided, repeat=2))
    for pair in itertools.product(divided, others):
        pairs += [pair, pair[::-1]]
    narrow, plain = Side(NARROW_EXPERTS, 4), Side("zero3", 2)
    pairs += [(narrow, narrow), (narrow, plain), (plain, narrow)]
    return [Cell(precision, MIXTURE, *pair) for pair in pairs]


def nvme_cells(precision: str) -> list[Cell]:
    """Return cells of optimizer states in files: resumed unchanged or on another number of ranks,
    left for other layouts, and reached from them.
    """
    alone, on_two = Side("zero3_nvme", 1), Side("zero3_nvme", 2)
    plain = Side("zero1", 2)
    pairs = ((on_two, on_two), (on_two, plain), (plain, on_two), (on_two, alone))
    return [Cell(precision, WIDE, *pair) for pair in pairs]


def covering_cells() -> list[Cell]:
    """Return a small set of cells that covers all properties of `covers`, without NVMe."""
    return covering([cell for cell in all_cells() if cell.architecture != WIDE], covers)


def covers(cell: Cell) -> set[tuple[Any, ...]]:
    """Return the properties that a cell covers: a layout left or reached in a precision, or resumed
    unchanged; an architecture in fp32 or bf16; a change of the number of ranks. Divided stages,
    experts and rows count separately: in pairs with all of these they would take a dozen cells.
    """
    precision, source, target = cell.precision, cell.source, cell.target
    if any(side.layout in DIVIDED_STAGES for side in (source, target)):
        return _covers_of_divided_stages(cell)
    if NARROW_EXPERTS in (source.layout, target.layout):
        return set()
    if any(side.layout in EXPERTS for side in (source, target)):
        return _covers_of_experts(cell)
    if rows := {*ROWS} & {source.layout, target.layout}:
        return {("rows", "same" if cell.same else "moved", *rows)}
    shown: set[tuple[Any, ...]] = {("architecture", cell.architecture)}
    if precision != "fp16":
        shown |= {("architecture", precision, cell.architecture)}
    if cell.same and source.layout in BF16_STATES:
        return shown | {("same", "bf16_states")}
    if cell.same:
        # zeropp continues in the same way as zero3.
        return shown | {("same", source.layout)} - {("same", "zeropp")}
    shown |= {("ranks", source.ranks, target.ranks)}
    if target.layout == "zeropp":
        shown |= {("second copy", cell.architecture == FROZEN)} - {("second copy", False)}
    if source.layout == target.layout:
        return shown
    return shown | {("from", precision, source.layout), ("to", precision, target.layout)}


def _covers_of_divided_stages(cell: Cell) -> set[tuple[Any, ...]]:
    """Return the properties of divided stages: left for ZeRO 3 in bf16, reached from it in fp32, in
    fp16, resumed unchanged.
    """
    kind, layouts = "divided stages", [cell.source.layout, cell.target.layout]
    if cell.same:
        return {(kind, "same")} if cell.source.layout == "pipe2_tensor2_zero1" else set()
    if cell.precision == "fp16":
        return {(kind, "fp16")}
    way = {"bf16": layouts[1], "fp32": layouts[0]}[cell.precision]
    return {(kind, cell.precision)} if way == "zero3" else set()


def _covers_of_experts(cell: Cell) -> set[tuple[Any, ...]]:
    """Return the properties of divided experts: resumed unchanged at each stage, each precision,
    left for and reached from every other layout.
    """
    kind, layouts = "experts", [cell.source.layout, cell.target.layout]
    if cell.same:
        return {(kind, "same", cell.source.layout)}
    shown: set[tuple[Any, ...]] = {(kind, cell.precision)}
    others = [(place, layout) for place, layout in enumerate(layouts) if layout not in EXPERTS]
    return shown | {(kind, "left" if place else "reached") for place, _ in others}
