"""The cells that the parity gate compares."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.gates.cells import KINDS, LAYOUTS, RECOMPUTED, Divided, Sizes
from tests.gates.models import (
    DIVIDED,
    DROPPING,
    FLAT,
    HEAVY,
    MIXTURES,
    NOT_IN_FP16,
    PIPELINED,
    PRESETS,
    RECURRENT,
    ROWS,
    WIDE,
)

STEPS = 20
ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""Layouts that are compared with every other value."""
FEW = ("zeropp", "zero2_bf16_states", "zero3_bf16_states", "compiled_zero3", "compiled_zero1")
"""Layouts in few combinations, a kind of them by itself in the covering set."""
COVERED_KINDS = ("longformer_zero3", "performer_zero3")
"""Those of the layouts with a kind of attention that are in the covering set: one that goes by
pieces, and one by sums."""
NVME = ("zero3_nvme",)
"""Layouts that are not in the covering set."""
STAGES = tuple(f"pipe{n}_zero{stage}" for n in (2, 4) for stage in (0, 1))
DIVIDED_STAGES = tuple(f"pipe2_tensor2_zero{stage}" for stage in (0, 1))
# Where several cells cover equally many pairs, the covering set takes the first.
OTHER_ATTENTION = ("mistral", "gemma2", "phi3", "gpt_neox")
"""Families in whose attention something is that FLAT has not: windows, caps, fused projections."""
DOCUMENTS = ("llama", "mistral", "gemma2", "gpt_neox")
"""Families whose documents are kept apart by their bounds: shared key heads, windows, soft-capped
scores, fused projections."""
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
        """Name in tables and files."""
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
        """Line for the terminal."""
        return f"trained {self.cell.name}" + (f" with {self.defect}" if self.defect else "")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Return what `asdict` gave as JSON."""
        return cls(**{**values, "cell": Cell(**values["cell"])})


def all_cells() -> list[Cell]:
    """Every combination."""
    values = (FLAT, ZERO, PRECISIONS, ACCUMULATIONS, RANKS)
    cells = [Cell(*combination) for combination in itertools.product(*values)]
    others = (
        preset_cells(),
        few_cells(FLAT),
        nvme_cells(),
        compiled_cells(),
        pipeline_cells(),
        tensor_cells(),
        sequence_cells(),
        varlen_cells(),
        kind_cells(),
        chunked_cells(),
        recomputed_cells(),
        reversible_cells(),
        recurrent_cells(),
    )
    return [*cells, *itertools.chain(*others), *divided_stage_cells(), *expert_cells()]


def tensor_cells() -> list[Cell]:
    """Divided tensors: over both ranks, over pairs of four, and over all four; of families that
    divide as another does two stages, on two ranks.
    """
    cells = []
    for architecture, stage, precision in itertools.product(FLAT, range(4), PRECISIONS):
        for places, accumulation, ranks in ((2, 4, 2), (2, 2, 4), (4, 2, 4)):
            layout = f"tensor{places}_zero{stage}"
            cells.append(Cell(architecture, layout, precision, accumulation, ranks))
    for architecture, stage, precision in itertools.product(DIVIDED, (1, 3), ("fp32", "bf16")):
        cells.append(Cell(architecture, f"tensor2_zero{stage}", precision, 4, 2))
    # One data rank, whose dropout the plain loop draws.
    return [*cells, *(Cell(DROPPING, f"tensor2_zero{stage}", "fp32", 4, 2) for stage in (1, 3))]


def sequence_cells() -> list[Cell]:
    """Divided rows, of several documents each: over both ranks, over pairs of four, and over all
    four, with half as many key heads; divided tensors, too; and families on two ranks.
    """
    cells = []
    for architecture, stage, precision in itertools.product(FLAT, (1, 2, 3), PRECISIONS):
        for places, accumulation, ranks in ((2, 4, 2), (2, 2, 4), (4, 2, 4)):
            layout = f"sequence{places}_zero{stage}"
            cells.append(Cell(architecture, layout, precision, accumulation, ranks))
    for architecture, precision in itertools.product(FLAT, PRECISIONS):
        cells.append(Cell(architecture, "sequence2_zero0", "fp32", 4, 2))
        for layout in ("tensor2_sequence2_zero1", "tensor2_sequence2_zero3"):
            cells.append(Cell(architecture, layout, precision, 2, 4))
    for architecture, stage, precision in itertools.product(ROWS, (1, 3), ("fp32", "bf16")):
        cells.append(Cell(architecture, f"sequence2_zero{stage}", precision, 4, 2))
    for architecture, precision in itertools.product(MIXTURES, PRECISIONS):
        for layout in ("sequence2_expert2_zero1", "sequence2_expert2_zero3"):
            cells.append(Cell(architecture, layout, precision, 2, 4))
    return list(dict.fromkeys(cells))


def varlen_cells() -> list[Cell]:
    """Documents by their bounds: every stage, several sequences in a micro-batch, and divided
    stages, tensors and rows.
    """
    cells = []
    for architecture, precision in itertools.product(DOCUMENTS, PRECISIONS):
        if precision == "fp16" and architecture in NOT_IN_FP16:
            continue
        for stage, accumulation in itertools.product(range(4), ACCUMULATIONS):
            layout = f"varlen_zero{stage}"
            cells.append(Cell(architecture, layout, precision, accumulation, 2))
    for architecture, precision in itertools.product(("mistral", "llama_deep"), PRECISIONS[:2]):
        cells.append(Cell(architecture, "varlen_pipe2_zero1", precision, 2, 2))
    for architecture, precision in itertools.product(("mistral", "llama"), PRECISIONS[:2]):
        for axis in ("tensor", "sequence"):
            cells.append(Cell(architecture, f"varlen_{axis}2_zero1", precision, 2, 2))
    return cells


def kind_cells() -> list[Cell]:
    """Kinds of attention: under ZeRO 3, and with divided stages, tensors and rows."""
    cells = []
    for kind, precision in itertools.product(KINDS, PRECISIONS[:2]):
        for way in ("zero3", "pipe2_zero1", "tensor2_zero1", "sequence2_zero1"):
            architecture = "llama_deep" if "pipe" in way else "llama"
            cells.append(Cell(architecture, f"{kind}_{way}", precision, 2, 2))
    return cells


def divided_stage_cells() -> list[Cell]:
    """Two stages of divided tensors: one model on four ranks, and two data ranks on eight."""
    cells = []
    for layout, precision in itertools.product(DIVIDED_STAGES, PRECISIONS):
        for accumulation, ranks in ((2, 4), (4, 4), (2, 8)):
            for architecture in ("llama_deep", "llama_tied", "gpt2_deep"):
                cells.append(Cell(architecture, layout, precision, accumulation, ranks))
    for architecture, precision in itertools.product(("qwen3_deep", "mixtral_deep"), PRECISIONS):
        cells.append(Cell(architecture, DIVIDED_STAGES[1], precision, 2, 4))
    return cells


def expert_cells() -> list[Cell]:
    """Divided experts: over both ranks, over pairs of four, over all four, and with divided tensors
    over pairs of four.
    """
    cells = []
    for architecture, stage, precision in itertools.product(MIXTURES, (1, 2, 3), PRECISIONS):
        for places, accumulation, ranks in ((2, 4, 2), (2, 2, 4), (4, 1, 4)):
            layout = f"expert{places}_zero{stage}"
            cells.append(Cell(architecture, layout, precision, accumulation, ranks))
        layout = f"tensor2_expert2_zero{stage}"
        cells.append(Cell(architecture, layout, precision, 2, 4))
    cells.append(Cell(HEAVY, "tensor2_expert2_zero1", "bf16", 2, 4))
    for stage in (1, 3):
        cells.append(Cell("mixtral", f"tensor2_sequence2_expert2_zero{stage}", "fp32", 2, 8))
    return cells


def recomputed_cells() -> list[Cell]:
    """Layers and MLPs that are computed again, and inputs that wait on the host: without ZeRO and
    with each stage in every precision, of divided tensors and rows, and of two pipeline stages.
    """
    cells = []
    for name, precision in itertools.product(RECOMPUTED, PRECISIONS):
        stages = [f"{name}_zero{stage}" for stage in range(4)]
        divided = [f"{name}_{axis}2_zero{n}" for axis in ("tensor", "sequence") for n in (1, 3)]
        cells += [Cell("llama", layout, precision, 4, 2) for layout in (*stages, *divided)]
        cells.append(Cell("llama_tied", f"{name}_pipe2_zero1", precision, 4, 2))
        for architecture, stage in itertools.product(FLAT[1:], (1, 3)):
            tiles = "mlp_tiles" in RECOMPUTED[name]
            if precision != "fp16" and not (tiles and architecture in MIXTURES):
                cells.append(Cell(architecture, f"{name}_zero{stage}", precision, 2, 2))
    return cells


def reversible_cells() -> list[Cell]:
    """Reversible layers at every stage and in every precision, and of divided tensors and rows."""
    cells = []
    for stage, precision in itertools.product(range(4), PRECISIONS):
        for architecture, accumulation in (("llama", 4), ("gpt2", 2)):
            layout = f"reversible_zero{stage}"
            cells.append(Cell(architecture, layout, precision, accumulation, 2))
    for axis, stage, precision in itertools.product(("tensor", "sequence"), (1, 3), PRECISIONS):
        cells.append(Cell("llama", f"reversible_{axis}2_zero{stage}", precision, 4, 2))
    return cells


def recurrent_cells() -> list[Cell]:
    """LSTM and GRU under every layout without stages, and cut into two."""
    layouts = (*ZERO, "pipe2_zero0", "pipe2_zero1", "full_zero3")
    return [
        Cell(cell, layout, precision, 4, 2)
        for cell, layout, precision in itertools.product(RECURRENT, layouts, PRECISIONS)
    ]


def compiled_cells() -> list[Cell]:
    """Compiled layers of divided tensors and rows; not in the covering set."""
    axes = itertools.product(("tensor", "sequence"), (1, 3), PRECISIONS)
    return [
        Cell("llama", f"compiled_{axis}2_zero{n}", precision, 2, 4) for axis, n, precision in axes
    ]


def chunked_cells() -> list[Cell]:
    """The loss in chunks: untied and tied, capped, beside a balancing loss; at every stage, on the
    last of two pipeline stages, and with divided tensors and rows.
    """
    cells = []
    for stage, precision in itertools.product(range(4), PRECISIONS):
        for architecture in ("llama", "gpt2", "mixtral", "gemma2"):
            cells.append(Cell(architecture, f"chunked_zero{stage}", precision, 4, 2))
    for stage, precision in itertools.product((0, 1), PRECISIONS):
        for architecture in ("llama_tied", "gemma2"):
            cells.append(Cell(architecture, f"chunked_pipe2_zero{stage}", precision, 4, 2))
    axes = itertools.product(("tensor", "sequence"), (1, 3), ("fp32", "bf16"))
    for axis, stage, precision in axes:
        for architecture in ("llama", "gemma2"):
            cells.append(Cell(architecture, f"chunked_{axis}2_zero{stage}", precision, 4, 2))
    return [c for c in cells if c.precision != "fp16" or c.architecture not in NOT_IN_FP16]


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
