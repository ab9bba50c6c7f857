"""The cells of the gates, and small sets that cover all their properties."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

from tests.gates.cell import Case, Cell, Side, Trip, covering
from tests.gates.layouts import AXES, KINDS, RECOMPUTED, Layout, names
from tests.gates.models import (
    DIVIDED,
    DROPOUT,
    DROPPING,
    EVERYWHERE,
    FLAT,
    FROZEN,
    HEAVY,
    MIXTURE,
    MIXTURES,
    NOT_IN_FP16,
    PIPELINED,
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
_AGAIN = f"{{{','.join(RECOMPUTED)}}}"
_APPROXIMATE = f"{{{','.join(KINDS)}}}"
_BY_ROWS = "{tensor,sequence}2_zero{1,3}"
Ways = tuple[tuple[int, int], ...]
"""Pairs of micro-batches per rank, and ranks."""
ON_TWO: Ways = ((4, 2),)
ON_FOUR: Ways = ((2, 4),)
Names = str | Iterable[str]
"""Names, or patterns of names."""


def _of(architectures: Names, layouts: Names, precisions: Names, ways: Ways) -> Iterator[Cell]:
    several = (names(x) if isinstance(x, str) else x for x in (architectures, layouts, precisions))
    for *made, way in product(*several, ways):
        yield Cell(*made, *way)


def _parity() -> Iterator[Iterable[Cell]]:
    """Yield the cells of each kind of layout."""
    yield _of(FLAT, ZERO, PRECISIONS, ((1, 2), (1, 1), (4, 2), (4, 1)))
    yield _of(PRESETS, "zero{2,0,1,3,2_offload,3_offload}", PRECISIONS, ON_TWO)
    # Two micro-batches on each of four ranks.
    yield _of(FLAT, "zeropp compiled_zero{3,1}", PRECISIONS, ON_FOUR)
    yield _of(FLAT, "zero{2,3}_bf16_states", "bf16", ((2, 2),))
    yield _of("llama gpt2", "compiled_selective_zero{1,3}", "fp32", ((2, 2),))
    yield _of(WIDE, NVME, PRECISIONS, ((2, 2), (2, 1)))
    yield _of("llama", f"compiled_{_BY_ROWS}", PRECISIONS, ON_FOUR)
    # One and two micro-batches per stage, and 2 x 2 ranks.
    for architecture in PIPELINED:
        yield _of(architecture, "pipe2_zero{0,1}", PRECISIONS, ((2, 2), (4, 2), (2, 4)))
        yield _of(architecture, "pipe4_zero{0,1}", PRECISIONS, ((4, 4), (8, 4)))
    # Tensors over both ranks, over pairs of four, and over all four.
    for architecture, stage in product(FLAT, range(4)):
        yield _of(architecture, f"tensor2_zero{stage}", PRECISIONS, ON_TWO + ON_FOUR)
        yield _of(architecture, f"tensor4_zero{stage}", PRECISIONS, ON_FOUR)
    yield _of("llama gpt2 mixtral", "whole_tensor2_zero{1,3}", TWO, ON_TWO)
    yield _of(DIVIDED, "tensor2_zero{1,3}", TWO, ON_TWO)
    # One data rank, whose dropout the plain loop draws.
    yield _of(DROPPING, "{,whole_}tensor2_zero{1,3}", "fp32", ON_TWO)
    # Rows in the same ways, with several documents each; over all four ranks, with half as many
    # key heads.
    yield _of(FLAT, "sequence2_zero{1,2,3}", PRECISIONS, ON_TWO + ON_FOUR)
    yield _of(FLAT, "sequence4_zero{1,2,3}", PRECISIONS, ON_FOUR)
    yield _of(FLAT, "sequence2_zero0", "fp32", ON_TWO)
    yield _of(FLAT, "tensor2_sequence2_zero{1,3}", PRECISIONS, ON_FOUR)
    yield _of(ROWS, "sequence2_zero{1,3}", TWO, ON_TWO)
    yield _of(MIXTURES, "sequence2_expert2_zero{1,3}", PRECISIONS, ON_FOUR)
    # Documents separated by bounds; also several sequences in a micro-batch.
    yield _of(DOCUMENTS, "varlen_zero{0,1,2,3}", PRECISIONS, ((1, 2), (4, 2)))
    yield _of("mistral llama_deep", "varlen_pipe2_zero1", TWO, ((2, 2),))
    yield _of("mistral llama", "varlen_{tensor,sequence}2_zero1", TWO, ((2, 2),))
    divided = "{zero3,tensor2_zero1,sequence2_zero1}"
    yield _of("llama", f"{_APPROXIMATE}_{divided}", TWO, ((2, 2),))
    yield _of("llama_deep", f"{_APPROXIMATE}_pipe2_zero1", TWO, ((2, 2),))
    # The loss in chunks: untied and tied, capped, with a balancing loss.
    yield _of("llama gpt2 mixtral gemma2", "chunked_zero{0,1,2,3}", PRECISIONS, ON_TWO)
    yield _of("llama_tied gemma2", "chunked_pipe2_zero{0,1}", PRECISIONS, ON_TWO)
    yield _of("llama gemma2", f"chunked_{_BY_ROWS}", TWO, ON_TWO)
    # Recomputed layers and MLPs, and offloaded inputs. Only dense MLPs are computed in tiles.
    yield _of("llama", f"{_AGAIN}_zero{{0,1,2,3}} {_AGAIN}_{_BY_ROWS}", PRECISIONS, ON_TWO)
    yield _of("llama_tied", f"{_AGAIN}_pipe2_zero1", PRECISIONS, ON_TWO)
    yield _of("gpt2 qwen3", f"{_AGAIN}_zero{{1,3}}", TWO, ((2, 2),))
    yield _of("mixtral", "{full,every2,selective,offloaded}_zero{1,3}", TWO, ((2, 2),))
    yield _of("llama", "reversible_zero{0,1,2,3}", PRECISIONS, ON_TWO)
    yield _of("gpt2", "reversible_zero{0,1,2,3}", PRECISIONS, ((2, 2),))
    yield _of("llama", f"reversible_{_BY_ROWS}", PRECISIONS, ON_TWO)
    yield _of(RECURRENT, (*ZERO, *STAGES[:2], "full_zero3"), PRECISIONS, ON_TWO)
    # Divided stages: one model on four ranks, two data ranks on eight.
    families, ways = "llama_deep llama_tied gpt2_deep", (*ON_FOUR, (4, 4), (2, 8))
    yield _of(families, DIVIDED_STAGES, PRECISIONS, ways)
    yield _of("qwen3_deep mixtral_deep", "pipe2_tensor2_zero1", PRECISIONS, ON_FOUR)
    yield _of(MIXTURES, "expert2_zero{1,2,3}", PRECISIONS, ON_TWO + ON_FOUR)
    yield _of(MIXTURES, "expert4_zero{1,2,3}", PRECISIONS, ((1, 4),))
    yield _of(MIXTURES, "tensor2_expert2_zero{1,2,3}", PRECISIONS, ON_FOUR)
    yield _of(HEAVY, "tensor2_expert2_zero1", "bf16", ON_FOUR)
    yield _of("mixtral", "tensor2_sequence2_expert2_zero{1,3}", "fp32", ((2, 8),))


@functools.cache
def parity_cells() -> tuple[Cell, ...]:
    """Return every combination except those that transformers' own model cannot train.

    If several cells cover equally many pairs, the covering set takes the first.
    """
    every = dict.fromkeys(itertools.chain.from_iterable(_parity()))
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
    families = {"pipeline": "llama_tied", "expert": "mixtral"}

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


# The memory gate. Most of stage 0 in half precision is left out, since it runs as stage 1.

_SUMS = "bf16 bf16_fp32_sums"
_ALL = f"fp32 {_SUMS} fp16 fp16_fp32_sums bf16_states bf16_states_fp32_sums"
_HELD = {  # layouts: precisions
    "zero0 tensor2_zero0": "fp32",
    "zero1": _ALL.removesuffix(" bf16_states_fp32_sums"),
    "zero2 zero3 zeropp": _ALL,
    "zero{1_offload,2_offload,3_offload_states,3_offload}": f"fp32 {_SUMS} fp16 fp16_fp32_sums",
    "{tensor2,tensor2_tied}_zero1 tensor2_zero{2,3} sequence2_zero{1,2,3}": "fp32 bf16",
    "pipe2_zero0 pipe2_tensor2_zero0 tensor2_expert2_zero{1,3}": "fp32 bf16",
    "pipe2_zero1": f"fp32 {_SUMS} fp16",
    "pipe2_tensor2_zero1 expert2_zero{1,2,3}": f"fp32 {_SUMS}",
    "varlen_{tensor,sequence}2_zero1 chunked_zero{1,3}": "fp32 bf16",
    "chunked_{pipe,tensor,sequence}2_zero1": "fp32 bf16",
    f"{_AGAIN}_zero{{1,2,3}} reversible_zero{{1,2,3}}": "fp32 bf16",
}
_OPTIMIZERS = [
    Case.of("zero0", "fp32", 1, "adafactor"),
    Case.of("zero1", "bf16_fp32_sums", 1, "muon"),
    Case.of("zero2", "fp32", 4, "adagrad"),
    Case.of("zero2_offload", "bf16", 1, "lion"),
    Case.of("zero3", "fp32", 1, "muon"),
    Case.of("zero3", "bf16_fp32_sums", 1, "lion"),
    Case.of("zero1", "fp32", 1, "momentum"),
    Case.of("zero2", "bf16", 1, "sgd"),
    Case.of("zero2", "bf16", 1, "adam8bit"),
]


def memory_cases() -> list[Case]:
    """Return every combination that the harness runs."""
    return [
        Case.of(layout, precision, accumulation)
        for layouts, precisions in _HELD.items()
        for layout, precision in product(names(layouts), precisions.split())
        for accumulation in (1, 4)
    ] + _OPTIMIZERS


_COVERING = """
    zero0-fp32-4 zero1-fp32-1 zero1-bf16_fp32_sums-4 zero1-fp16_fp32_sums-1 zero2-bf16-4
    zero2-fp16_fp32_sums-4 zero3-fp32-4 zero3-bf16_fp32_sums-1 zero1_offload-bf16_fp32_sums-1
    zero2_offload-bf16-4 zero3_offload_states-fp16-1 zero3_offload-bf16-4 zeropp-fp16-4
    zero2-bf16_states_fp32_sums-4 zero3-bf16_states-1 tensor2_zero0-fp32-1 tensor2_zero1-bf16-4
    tensor2_zero2-bf16-1 tensor2_tied_zero1-fp32-1 tensor2_zero3-bf16-1 sequence2_zero1-bf16-1
    sequence2_zero2-fp32-4 sequence2_zero3-bf16-4 varlen_tensor2_zero1-bf16-1
    varlen_sequence2_zero1-fp32-4 expert2_zero1-bf16-1 expert2_zero2-fp32-4 expert2_zero3-bf16-1
    tensor2_expert2_zero1-bf16-1 tensor2_expert2_zero3-fp32-1 chunked_zero1-bf16-4
    chunked_zero3-bf16-1 chunked_pipe2_zero1-fp32-4 chunked_tensor2_zero1-fp32-1
    chunked_sequence2_zero1-bf16-1 pipe2_zero0-bf16-4 pipe2_zero1-fp32-1
    pipe2_zero1-bf16_fp32_sums-4 pipe2_tensor2_zero0-bf16-4 pipe2_tensor2_zero1-fp32-1
    pipe2_tensor2_zero1-bf16_fp32_sums-4 full_zero1-bf16-4 full_zero2-fp32-1 full_zero3-bf16-4
    every2_zero1-fp32-1 every2_zero2-bf16-4 every2_zero3-fp32-1 selective_zero1-bf16-4
    selective_zero2-fp32-1 selective_zero3-bf16-1 offloaded_zero1-fp32-1 offloaded_zero2-bf16-4
    offloaded_zero3-bf16-1 tiled_zero1-bf16-1 tiled_zero2-fp32-4 tiled_zero3-bf16-4
    reversible_zero1-fp32-4 reversible_zero2-bf16-1 reversible_zero3-bf16-4 all_zero1-fp32-4
    all_zero2-bf16-1 all_zero3-fp32-4
"""


def covering_cases() -> list[Case]:
    """Return a small set with every layout, precision, accumulation and optimizer class."""
    by_name = {case.name: case for case in memory_cases()}
    optimizers = [case for case in _OPTIMIZERS if case.optimizer in ("adagrad", "muon")]
    return [by_name[name] for name in _COVERING.split()] + optimizers


LAYOUTS = {
    cell.layout: Layout.named(cell.layout)
    for cell in (
        *parity_cells(),
        *(side for trip in trips() for side in (trip.source, trip.target)),
        *memory_cases(),
    )
}
"""Every layout of a cell."""
