"""The cells that the parity gate compares, and small sets that cover all their properties."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from tests.gates.cells import KINDS, LAYOUTS, RECOMPUTED, Divided, Sizes, covering
from tests.gates.models import (
    DIVIDED,
    DROPPING,
    FLAT,
    HEAVY,
    MIXTURES,
    NOT_IN_FP16,
    PIPELINED,
    PLANTED,
    PRESETS,
    RECURRENT,
    ROWS,
    WIDE,
)

STEPS = 20
ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""Layouts that are combined with every other value."""
FEW = ("zeropp", "zero2_bf16_states", "zero3_bf16_states", "compiled_zero3", "compiled_zero1")
"""Layouts in few combinations; in the covering set, each counts as a separate kind."""
COVERED_KINDS = ("longformer_zero3", "performer_zero3")
"""Approximate attention in the covering set: one kind that works in blocks, and one with sums."""
NVME = ("zero3_nvme",)
"""Layouts outside the covering set."""
STAGES = tuple(f"pipe{n}_zero{stage}" for n in (2, 4) for stage in (0, 1))
DIVIDED_STAGES = tuple(f"pipe2_tensor2_zero{stage}" for stage in (0, 1))
OTHER_ATTENTION = ("mistral", "gemma2", "phi3", "gpt_neox")
"""Families whose attention has features that FLAT lacks: windows, caps, fused projections."""
DOCUMENTS = ("llama", "mistral", "gemma2", "gpt_neox")
"""Families whose documents are separated by bounds: shared key heads, windows, soft-capped scores,
fused projections.
"""
PRECISIONS = ("fp32", "bf16", "fp16")
TWO = PRECISIONS[:2]
ACCUMULATIONS = (1, 4)
RANKS = (2, 1)
AXES = ("pipeline", "tensor", "sequence", "expert")
_SIZES = Sizes(bucket=4096, live=20_000, sub_group=20_000, persistence=64)


@dataclass(frozen=True)
class Cell(Divided):
    """One combination; `accumulation` is micro-batches per rank and optimizer step."""

    architecture: str
    layout: str
    precision: str
    accumulation: int
    ranks: int

    @classmethod
    def named(cls, name: str) -> Cell:
        """Return the cell of a name. Raises ValueError for a malformed name."""
        architecture, layout, precision, accumulation, ranks = name.split("-")
        return cls(architecture, layout, precision, int(accumulation), int(ranks))

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return "-".join(str(value) for value in asdict(self).values())

    @property
    def sums(self) -> str:
        """The precision in which a rank sums the gradients of its micro-batches."""
        return self.how.sums_of(self.precision)

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed JSON of this cell, before it is resolved."""
        precision = self.how.full_precision(self.precision)
        return self.how.json(precision, _SIZES, {"initial_scale_power": 12})


@dataclass(frozen=True)
class Job:
    """A cell to train into a folder, optionally with a planted defect."""

    cell: Cell
    defect: str | None = None
    folder: str = "."

    @property
    def label(self) -> str:
        """Line for the terminal."""
        return f"trained {self.cell.name}" + (f" with {self.defect}" if self.defect else "")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Return the job from the JSON of `asdict`."""
        return cls(**{**values, "cell": Cell(**values["cell"])})


def all_cells() -> list[Cell]:
    """Return every combination except those that transformers' own model cannot train.

    If several cells cover equally many pairs, the covering set takes the first.
    """
    kinds = (
        flat_cells,
        preset_cells,
        few_cells,
        nvme_cells,
        compiled_cells,
        pipeline_cells,
        tensor_cells,
        sequence_cells,
        varlen_cells,
        kind_cells,
        chunked_cells,
        recomputed_cells,
        reversible_cells,
        recurrent_cells,
        divided_stage_cells,
        expert_cells,
    )
    return [
        cell
        for kind in kinds
        for cell in dict.fromkeys(kind())
        if cell.precision != "fp16" or cell.architecture not in NOT_IN_FP16
    ]


def flat_cells() -> Iterator[Cell]:
    """Return the cells of every value with every other."""
    return itertools.starmap(Cell, product(FLAT, ZERO, PRECISIONS, ACCUMULATIONS, RANKS))


def preset_cells() -> Iterator[Cell]:
    """Return the presets' other architectures with every layout without stages, ZeRO 2 first."""
    layouts = dict.fromkeys(("zero2", *ZERO))
    return itertools.starmap(Cell, product(PRESETS, layouts, PRECISIONS, (4,), (2,)))


def few_cells() -> Iterator[Cell]:
    """Yield FEW layouts with every architecture and precision, with two micro-batches on each of
    four ranks; those that differ from ZERO only in their states, on two ranks in bf16.
    """
    for states in (False, True):
        layouts = [name for name in FEW if LAYOUTS[name].has_bf16_states == states]
        precisions, ranks = (("bf16",), 2) if states else (PRECISIONS, 4)
        for layout, architecture, precision in product(layouts, FLAT, precisions):
            yield Cell(architecture, layout, precision, 2, ranks)


def nvme_cells() -> Iterator[Cell]:
    """Return cells of optimizer states in files, in every precision, on one and on two ranks."""
    return itertools.starmap(Cell, product((WIDE,), NVME, PRECISIONS, (2,), RANKS))


def compiled_cells() -> Iterator[Cell]:
    """Yield compiled layers with tensor and sequence parallelism; not in the covering set."""
    for axis, stage, precision in product(("tensor", "sequence"), (1, 3), PRECISIONS):
        yield Cell("llama", f"compiled_{axis}2_zero{stage}", precision, 2, 4)


def pipeline_cells() -> Iterator[Cell]:
    """Yield all pipelined combinations: one and two micro-batches per stage, and 2 x 2 ranks."""
    for architecture, layout, precision in product(PIPELINED, STAGES, PRECISIONS):
        stages = LAYOUTS[layout].pipeline
        yield Cell(architecture, layout, precision, stages, stages)
        yield Cell(architecture, layout, precision, 2 * stages, stages)
        if stages == 2:
            yield Cell(architecture, layout, precision, stages, 2 * stages)


def tensor_cells() -> Iterator[Cell]:
    """Yield cells of tensor parallelism: over both ranks, over pairs of four, and over all four.
    For families that are divided like another one: two ZeRO stages, on two ranks.
    """
    ways = ((2, 4, 2), (2, 2, 4), (4, 2, 4))
    for architecture, stage, precision, way in product(FLAT, range(4), PRECISIONS, ways):
        yield Cell(architecture, f"tensor{way[0]}_zero{stage}", precision, *way[1:])
    for architecture, stage, precision in product(DIVIDED, (1, 3), TWO):
        yield Cell(architecture, f"tensor2_zero{stage}", precision, 4, 2)
    for stage in (1, 3):  # one data rank, whose dropout the plain loop draws
        yield Cell(DROPPING, f"tensor2_zero{stage}", "fp32", 4, 2)


def sequence_cells() -> Iterator[Cell]:
    """Yield cells of sequence parallelism, with several documents per row: over both ranks, over
    pairs of four, and over all four with half as many key heads; also with tensor parallelism, and
    more families on two ranks.
    """
    ways = ((2, 4, 2), (2, 2, 4), (4, 2, 4))
    for architecture, stage, precision, way in product(FLAT, (1, 2, 3), PRECISIONS, ways):
        yield Cell(architecture, f"sequence{way[0]}_zero{stage}", precision, *way[1:])
    for architecture, precision in product(FLAT, PRECISIONS):
        yield Cell(architecture, "sequence2_zero0", "fp32", 4, 2)
        for stage in (1, 3):
            yield Cell(architecture, f"tensor2_sequence2_zero{stage}", precision, 2, 4)
    for architecture, stage, precision in product(ROWS, (1, 3), TWO):
        yield Cell(architecture, f"sequence2_zero{stage}", precision, 4, 2)
    for architecture, precision, stage in product(MIXTURES, PRECISIONS, (1, 3)):
        yield Cell(architecture, f"sequence2_expert2_zero{stage}", precision, 2, 4)


def varlen_cells() -> Iterator[Cell]:
    """Yield cells of documents separated by bounds: every stage, several sequences in a
    micro-batch, and pipeline, tensor and sequence parallelism.
    """
    every = product(DOCUMENTS, PRECISIONS, range(4), ACCUMULATIONS)
    for architecture, precision, stage, accumulation in every:
        yield Cell(architecture, f"varlen_zero{stage}", precision, accumulation, 2)
    for architecture, precision in product(("mistral", "llama_deep"), TWO):
        yield Cell(architecture, "varlen_pipe2_zero1", precision, 2, 2)
    for architecture, precision, axis in product(("mistral", "llama"), TWO, ("tensor", "sequence")):
        yield Cell(architecture, f"varlen_{axis}2_zero1", precision, 2, 2)


def kind_cells() -> Iterator[Cell]:
    """Yield approximate attention with ZeRO 3, and with pipeline, tensor and sequence
    parallelism.
    """
    ways = ("zero3", "pipe2_zero1", "tensor2_zero1", "sequence2_zero1")
    for kind, precision, way in product(KINDS, TWO, ways):
        architecture = "llama_deep" if "pipe" in way else "llama"
        yield Cell(architecture, f"{kind}_{way}", precision, 2, 2)


def chunked_cells() -> Iterator[Cell]:
    """Yield cells of the chunked loss: untied and tied, capped, with a balancing loss; at every
    stage, on the last of two pipeline stages, and with tensor and sequence parallelism.
    """
    families = ("llama", "gpt2", "mixtral", "gemma2")
    for stage, precision, architecture in product(range(4), PRECISIONS, families):
        yield Cell(architecture, f"chunked_zero{stage}", precision, 4, 2)
    for stage, precision, architecture in product((0, 1), PRECISIONS, ("llama_tied", "gemma2")):
        yield Cell(architecture, f"chunked_pipe2_zero{stage}", precision, 4, 2)
    axes = product(("tensor", "sequence"), (1, 3), TWO, ("llama", "gemma2"))
    for axis, stage, precision, architecture in axes:
        yield Cell(architecture, f"chunked_{axis}2_zero{stage}", precision, 4, 2)


def recomputed_cells() -> Iterator[Cell]:
    """Yield cells of recomputed layers and MLPs, and of offloaded inputs: at every ZeRO stage in
    every precision, with tensor and sequence parallelism, and with two pipeline stages.
    """
    for name, precision in product(RECOMPUTED, PRECISIONS):
        divided = [f"{axis}2_zero{stage}" for axis in ("tensor", "sequence") for stage in (1, 3)]
        for way in (*(f"zero{stage}" for stage in range(4)), *divided):
            yield Cell("llama", f"{name}_{way}", precision, 4, 2)
        yield Cell("llama_tied", f"{name}_pipe2_zero1", precision, 4, 2)
        for architecture, stage in product(FLAT[1:], (1, 3)):
            tiles = "mlp_tiles" in RECOMPUTED[name]
            if precision != "fp16" and not (tiles and architecture in MIXTURES):
                yield Cell(architecture, f"{name}_zero{stage}", precision, 2, 2)


def reversible_cells() -> Iterator[Cell]:
    """Yield reversible layers at every stage in every precision, and with tensor and sequence
    parallelism.
    """
    for stage, precision in product(range(4), PRECISIONS):
        yield Cell("llama", f"reversible_zero{stage}", precision, 4, 2)
        yield Cell("gpt2", f"reversible_zero{stage}", precision, 2, 2)
    for axis, stage, precision in product(("tensor", "sequence"), (1, 3), PRECISIONS):
        yield Cell("llama", f"reversible_{axis}2_zero{stage}", precision, 4, 2)


def recurrent_cells() -> Iterator[Cell]:
    """Return cells of LSTM and GRU with every layout without stages, and with two."""
    layouts = (*ZERO, "pipe2_zero0", "pipe2_zero1", "full_zero3")
    return itertools.starmap(Cell, product(RECURRENT, layouts, PRECISIONS, (4,), (2,)))


def divided_stage_cells() -> Iterator[Cell]:
    """Yield two pipeline stages with tensor parallelism: one model on four ranks, two data ranks on
    eight.
    """
    families, ways = ("llama_deep", "llama_tied", "gpt2_deep"), ((2, 4), (4, 4), (2, 8))
    for layout, precision, way, architecture in product(DIVIDED_STAGES, PRECISIONS, ways, families):
        yield Cell(architecture, layout, precision, *way)
    for architecture, precision in product(("qwen3_deep", "mixtral_deep"), PRECISIONS):
        yield Cell(architecture, DIVIDED_STAGES[1], precision, 2, 4)


def expert_cells() -> Iterator[Cell]:
    """Yield cells of expert parallelism: over both ranks, over pairs of four, over all four, and
    with tensor parallelism over pairs of four.
    """
    ways = (("expert2", 4, 2), ("expert2", 2, 4), ("expert4", 1, 4), ("tensor2_expert2", 2, 4))
    for architecture, stage, precision, way in product(MIXTURES, (1, 2, 3), PRECISIONS, ways):
        yield Cell(architecture, f"{way[0]}_zero{stage}", precision, *way[1:])
    yield Cell(HEAVY, "tensor2_expert2_zero1", "bf16", 2, 4)
    for stage in (1, 3):
        yield Cell("mixtral", f"tensor2_sequence2_expert2_zero{stage}", "fp32", 2, 8)


def covering_cells() -> list[Cell]:
    """Return a small set in which every possible pair of values occurs. In pipelined cells and
    PRESETS an architecture counts separately, and so does a layout of FEW: pairs would take dozens
    more cells.
    """
    return covering([cell for cell in all_cells() if cell.layout not in NVME], covers)


def brief_cells() -> list[Cell]:
    """Return a few cells on two ranks, trained on every change: each pair of precision and ZeRO
    stage from 1 on, each parallel axis, and offload occur once. Few families need few plain loops.
    """
    families = {"pipeline": "llama_tied", "expert": "mixtral"}

    def is_one(cell: Cell) -> bool:
        axis = next((axis for axis in families if getattr(cell.how, axis) > 1), None)
        return cell.ranks == 2 and cell.architecture == families.get(axis or "", "llama")

    return covering(
        [cell for cell in all_cells() if is_one(cell) and cell.layout not in NVME], _occurs
    )


def _occurs(cell: Cell) -> set[tuple[str, object]]:
    how = cell.how
    axes = {name for name in AXES if getattr(how, name) > 1} or {"data"}
    if "offload" in cell.layout:
        axes = {"offload"}
    covered: set[tuple[str, object]] = {("axis", axis) for axis in axes}
    return covered | ({("precision, stage", (cell.precision, how.stage))} if how.stage else set())


def covers(cell: Cell) -> set[tuple[tuple[str, Any], ...]]:
    """Return the properties that the covering set no longer needs once it has this cell."""
    how, own = cell.how, asdict(cell)
    values: dict[str, Any] = own | {name: getattr(how, name) for name in (*AXES, "stage")}

    def each(kind: str, *names: str) -> set[tuple[tuple[str, Any], ...]]:
        return {((f"{kind} {name}", values[name]),) for name in names}

    if cell.architecture in PLANTED:
        return set()
    if cell.architecture in RECURRENT:
        return each("recurrent", "architecture", "precision", "pipeline")
    if cell.layout in FEW:
        kind = "bf16_states" if how.has_bf16_states else cell.layout.partition("_zero")[0]
        return {(("layout", kind),)}
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
