"""The cells of the gates, and small sets that cover all their properties."""

import functools
import itertools
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

from harness.config.sections import NEXT_TOKEN
from tests.gates import models
from tests.gates.cell import Case, Cell, Side, Trip, covering
from tests.gates.layouts import AXES, KINDS, RECOMPUTED, Layout, names
from tests.gates.models import (
    DROPOUT,
    EVERYWHERE,
    FROZEN,
    MIXTURE,
    NOT_IN_FP16,
    PLANTED,
    PRESETS,
    RECURRENT,
    ROWS,
    SHARED,
    WIDE,
)

PRECISIONS = ("fp32", "bf16", "fp16")
TWO = PRECISIONS[:2]

# The parity gate.

ZERO = tuple(names("zero{0,1,2,3,2_offload,3_offload}"))
"""Layouts that are combined with every other value."""
FEW = tuple(names("zeropp zero{2,3}_bf16_states compiled_zero{3,1}"))
"""Layouts in few combinations; in the covering set, each counts as a separate kind."""
COVERED_KINDS = ("longformer_zero3", "performer_zero3")
"""Approximate attention in the covering set: one kind that works in blocks, and one with sums."""
NVME = ("zero3_nvme",)
"""Layouts outside the covering set."""
STAGES = tuple(names("pipe{2,4}_zero{0,1}"))
DIVIDED_STAGES = tuple(names("pipe2_tensor2_zero{0,1}"))
OTHER_ATTENTION = ("mistral", "gemma2", "phi3", "gpt_neox")
"""Families whose attention has features that FLAT lacks: windows, caps, fused projections."""
DOCUMENTS = ("llama", "mistral", "gemma2", "gpt_neox")
"""Families with document bounds: shared key heads, windows, soft caps, fused projections."""
AXIS_NAMES = tuple(AXES.values())
AGAIN = f"{{{','.join(RECOMPUTED)}}}"
APPROXIMATE = f"{{{','.join(KINDS)}}}"
BY_ROWS = "{tensor,sequence}2_zero{1,3}"
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _columns(row: str) -> list[list[str]]:
    """Return the names that each column of a row stands for."""
    constants = {
        name: value if isinstance(value, str) else " ".join(map(str, value))
        for name, value in (vars(models) | globals()).items()
        if name.isupper() and isinstance(value, str | tuple | dict)
    }
    return [names(column) for column in Template(row).substitute(constants).split(" | ")]


def _parity() -> Iterator[Cell]:
    for row in _TABLES["parity"]:
        *columns, ways = _columns(row)
        for *made, way in product(*columns, ways):
            yield Cell(*made, *map(int, way.split("x")))


@functools.cache
def parity_cells() -> tuple[Cell, ...]:
    """Return every combination except those that transformers' own model cannot train."""
    every = dict.fromkeys(_parity())
    return tuple(c for c in every if c.precision != "fp16" or c.architecture not in NOT_IN_FP16)


def covering_cells() -> list[Cell]:
    """Return a small set in which every possible pair of values occurs. In pipelined cells and
    PRESETS an architecture counts separately, and so does a layout of FEW: pairs would take dozens
    more cells.
    """
    return covering([cell for cell in parity_cells() if cell.layout not in NVME], covers)


def brief_cells() -> list[Cell]:
    """Return a few cells on two ranks, trained on every change: each precision, ZeRO
    stage from 1 on, parallel axis, and offload occur. Few families need few plain loops.
    """
    families = {"pipeline": "llama_tied", "expert": "mixtral", "sequence": "mixtral"}

    def is_one(cell: Cell) -> bool:
        axis = next((axis for axis in families if getattr(cell.how, axis) > 1), None)
        return cell.ranks == 2 and cell.architecture == families.get(axis or "", "llama")

    return covering(
        [cell for cell in parity_cells() if is_one(cell) and cell.layout not in NVME], _occurs
    )


def _occurs(cell: Cell) -> set[tuple[str, object]]:
    how = cell.how
    axes = {name for name in AXIS_NAMES if getattr(how, name) > 1} or {"data"}
    if "offload" in cell.layout:
        axes = {"offload"}
    covered: set[tuple[str, object]] = {("axis", axis) for axis in axes}
    covered.add(("precision", cell.precision))
    return covered | ({("stage", how.stage)} if how.stage else set())


def covers(cell: Cell) -> set[tuple[tuple[str, Any], ...]]:
    """Return the properties that the covering set no longer needs once it has this cell."""
    how, own = cell.how, asdict(cell)
    values: dict[str, Any] = own | {name: getattr(how, name) for name in (*AXIS_NAMES, "stage")}

    def each(kind: str, *names: str) -> set[tuple[tuple[str, Any], ...]]:
        return {((f"{kind} {name}", values[name]),) for name in names}

    if cell.architecture in PLANTED:
        return set()
    if cell.architecture in RECURRENT:
        return each("recurrent", "architecture", "precision", "pipeline")
    if cell.layout in FEW:
        kind = "bf16_states" if how.has_bf16_states else cell.layout.partition("_zero")[0]
        return {(("layout", kind),)}
    if how.objective != NEXT_TOKEN:
        chunks = {(("pairs in chunks", how.loss_chunk, name, values[name]),) for name in AXIS_NAMES}
        return chunks | each("pairs", "architecture", "precision", "stage", *AXIS_NAMES)
    if how.whole_residuals or (how.compiled and how.model):
        return {(("layout", cell.layout),)}
    if how.kind:
        return each("kind", "layout") if cell.layout in COVERED_KINDS else set()
    if how.varlen:
        return each("varlen", "architecture", "layout", "precision", "accumulation")
    if cell.layout in DIVIDED_STAGES:
        return each("divided stages", "layout", "precision", "ranks")
    if how.loss_chunk:
        axes = ("pipeline", "tensor", "sequence")
        return each("chunked", "architecture", "precision", "stage", *axes)
    if how.model:
        values["how"], _, rest = cell.layout.partition("_")
        values["axis"] = rest.rpartition("_")[0] or "data"
        return each("recomputed", "how", "axis", "stage", "precision")
    if how.compiled and how.sequence * how.tensor > 1:
        return set()  # each spends a minute on compilation
    if how.sequence > 1:  # only attention differs: not needed for every family with llama's
        is_alike = cell.architecture in ROWS and cell.architecture not in OTHER_ATTENTION
        names = () if is_alike else ("architecture",)
        return each("sequence", *names, "precision", "stage", "sequence", "tensor", "expert")
    if how.expert > 1:
        return each("expert", "architecture", "precision", "stage", "expert", "tensor")
    if how.tensor > 1:
        return each("tensor", "architecture", "layout", "precision")
    alone = set()
    if cell.layout in STAGES or cell.architecture in PRESETS:
        alone = {(("architecture", own.pop("architecture")),)}
    return alone | set(itertools.combinations(own.items(), 2))


# The checkpoint gate: pairs of sides, LAYOUTxRANKS.

SIDES = tuple(
    names(
        "zero{0,1,2,3,2_offload,3_offload} zeropp zero3_default pipe2_zero{0,1} zero{1,3}_bf16_sums"
    )
)
"""Layouts of the tied Llama, each of which is left for and reached from every other."""
# They continue bit-equal only with themselves; between them and others a checkpoint is rounded.
BF16_STATES = tuple(names("zero{2,3}_bf16_states"))
DIVIDED_SIDES = tuple(names("tensor2_zero{1,3}"))
ROW_SIDES = tuple(names("sequence2_zero{1,3}"))
EXPERT_SIDES = tuple(names("expert2_zero{1,3}"))
NARROW_EXPERTS = "tensor2_expert2_zero3"
"""Divided by number and by width; only in the full table."""
Pairs = Iterable[tuple[str, str]]


def sound_sides(precision: str) -> list[str]:
    """Return all sides that train correctly; in 16 bits, only a few of them on one rank."""
    alone = SIDES if precision == "fp32" else ("zero1", "zero3")
    every = (
        f"{layout}x{ranks}"
        for layout, ranks in product(SIDES, (1, 2))
        if ranks == 2 or (layout in alone and layout not in (*STAGES, "zeropp"))
    )
    return [side for side in every if _is_sound(precision, side)]


def _is_sound(precision: str, side: str) -> bool:
    return Side.of(precision, EVERYWHERE, side).is_sound


@functools.cache
def trips() -> tuple[Trip, ...]:
    """Return all round trips: a tied Llama between all layouts, other models where they differ."""
    made = [trip for precision in PRECISIONS for trip in _trips(precision)]
    # Optimizer states in files.
    of_files = [*_around(["zero3_nvmex2"], ["zero1x2"]), ("zero3_nvmex2", "zero3_nvmex1")]
    made += [Trip.of(p, WIDE, *pair) for p, pair in product(PRECISIONS, of_files)]
    return tuple(dict.fromkeys(made))


def _trips(precision: str) -> Iterator[Trip]:
    every, few = sound_sides(precision), names("zero{1,3}x2 pipe2_zero1x2 zero3x1")
    others = names("zero3x2 zero1x1 pipe2_zero1x2 tensor2_zero3x2")
    stages = names("pipe2_tensor2_zero{0,1}x4 pipe2_tensor2_zero1x8")
    stages = [side for side in stages if _is_sound(precision, side)]
    pairs: dict[str, Pairs] = {EVERYWHERE: product(every, every)}
    circle = [*zip(few, few, strict=True), *zip(few, few[1:] + few[:1], strict=True)]
    pairs |= dict.fromkeys(("llama", "mixtral", FROZEN), circle)
    for architecture, of_it in pairs.items():
        yield from (Trip.of(precision, architecture, *pair) for pair in of_it)
    if precision == "fp32":  # the second copy of untrained parameters
        yield Trip.of(precision, FROZEN, few[0], "zeroppx2")
    if precision == "bf16":
        yield from (Trip.of(precision, EVERYWHERE, f"{n}x2", f"{n}x2") for n in BF16_STATES)
    pairs = {
        SHARED: [
            *_around(names("tensor2_zero{1,3}x2"), few),
            *_around(stages, others),
            *_around(["sequence2_zero1x2"], ["zero3x2"]),
            *_around(["sequence2_zero3x2"], ["zero1x1", "tensor2_zero1x2"]),
        ],
        MIXTURE: [
            *_around(names("expert2_zero{1,3}x{2,4}"), others),
            *_around([f"{NARROW_EXPERTS}x4"], ["zero3x2"]),
        ],
        DROPOUT: zip(every, every, strict=True),  # another layout draws other masks
    }
    for architecture, of_it in pairs.items():
        yield from (Trip.of(precision, architecture, *pair) for pair in of_it)


def _around(own: list[str], others: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of `own` sides, then each left for each of the others and reached from it."""
    yield from product(own, own)
    for here, there in product(own, others):
        yield from ((here, there), (there, here))


def covering_trips() -> list[Trip]:
    """Return a small set that covers all properties of `trip_covers`, without NVMe."""
    return covering([trip for trip in trips() if trip.architecture != WIDE], trip_covers)


def trip_covers(trip: Trip) -> set[tuple[Any, ...]]:
    """Return the properties that a trip covers: a layout left or reached in a precision, or resumed
    unchanged; an architecture in fp32 or bf16; a change of the number of ranks. Divided stages,
    experts and rows count separately: in pairs with all of these they would take a dozen trips.
    """
    precision, (source, target) = trip.precision, trip.layouts
    if {*DIVIDED_STAGES} & {source, target}:
        return _stages_cover(trip)
    if NARROW_EXPERTS in (source, target):
        return set()
    if {*EXPERT_SIDES} & {source, target}:
        return _experts_cover(trip)
    if rows := {*ROW_SIDES} & {source, target}:
        return {("rows", "same" if trip.same else "moved", *sorted(rows))}
    shown: set[tuple[Any, ...]] = {("architecture", trip.architecture)}
    if precision != "fp16":
        shown |= {("architecture", precision, trip.architecture)}
    if trip.same and source in BF16_STATES:
        return shown | {("same", "bf16_states")}
    if trip.same:
        # zeropp continues in the same way as zero3.
        return shown | {("same", source)} - {("same", "zeropp")}
    shown |= {("ranks", trip.source.ranks, trip.target.ranks)}
    if target == "zeropp":
        shown |= {("second copy", trip.architecture == FROZEN)} - {("second copy", False)}
    if source == target:
        return shown
    return shown | {("from", precision, source), ("to", precision, target)}


def _stages_cover(trip: Trip) -> set[tuple[Any, ...]]:
    """Return the properties of divided stages: left for ZeRO 3 in bf16, reached from it in fp32, in
    fp16, resumed unchanged.
    """
    kind, (source, target) = "divided stages", trip.layouts
    if trip.same:
        return {(kind, "same")} if source == "pipe2_tensor2_zero1" else set()
    if trip.precision == "fp16":
        return {(kind, "fp16")}
    other = {"bf16": target, "fp32": source}[trip.precision]
    return {(kind, trip.precision)} if other == "zero3" else set()


def _experts_cover(trip: Trip) -> set[tuple[Any, ...]]:
    """Return the properties of divided experts: resumed unchanged at each stage, each precision,
    left for and reached from every other layout.
    """
    kind = "experts"
    if trip.same:
        return {(kind, "same", trip.source.layout)}
    ways = zip(("reached", "left"), trip.layouts, strict=True)
    return {(kind, trip.precision)} | {(kind, way) for way, it in ways if it not in EXPERT_SIDES}


# The memory gate.

_OPTIMIZERS = [Case.of(*row) for row in _TABLES["optimizers"]]


def memory_cases() -> list[Case]:
    """Return every combination that the harness runs."""
    return [
        Case.of(layout, precision, accumulation)
        for row in _TABLES["memory"]
        for layout, precision, accumulation in product(*_columns(row), (1, 4))
    ] + _OPTIMIZERS


def covering_cases() -> list[Case]:
    """Return a small set with every layout, precision, accumulation and optimizer class."""
    by_name = {case.name: case for case in memory_cases()}
    optimizers = [case for case in _OPTIMIZERS if case.optimizer in ("adagrad", "muon")]
    return [by_name[name] for name in _TABLES["covering_memory"].split()] + optimizers


LAYOUTS = {
    cell.layout: Layout.named(cell.layout)
    for cell in (
        *parity_cells(),
        *(side for trip in trips() for side in (trip.source, trip.target)),
        *memory_cases(),
    )
}
"""Every layout of a cell."""
