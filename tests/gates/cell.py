"""A cell of the gates: a model in a layout and a precision; and the jobs that train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from harness.layout.grid import Axis
from tests.gates.layouts import Json, Layout, Sizes
from tests.gates.models import ATTENTION, MEASURED_AS, SEQ_LEN

if TYPE_CHECKING:
    from harness.layout.world import World
    from harness.plan.plan import Plan

GLOBAL_BATCH = 8  # samples
STEPS = 8
HELD_OUT_SAMPLES = 13  # not divisible by any split into micro-batches and ranks
C = TypeVar("C")


@dataclass(frozen=True)
class Cell:
    """One combination, as the parity gate trains it; `accumulation`: micro-batches per step."""

    architecture: str
    layout: str
    precision: str
    accumulation: int
    ranks: int

    sizes: ClassVar[Sizes] = Sizes(bucket=4096, live=20_000, sub_group=20_000, persistence=64)
    scaling: ClassVar[Json] = {"initial_scale_power": 12}
    """Keys of fp16's loss scale."""
    seq_len: ClassVar[int] = SEQ_LEN
    estimating: ClassVar[bool] = False
    """True if its plan is compared with the estimate."""

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
    def how(self) -> Layout:
        """The layout that the name stands for."""
        return Layout.named(self.layout)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different samples."""
        return self.ranks // (self.how.pipeline * self.how.tensor * self.how.sequence)

    @property
    def global_batch(self) -> int:
        """Samples in one step."""
        return GLOBAL_BATCH

    @property
    def micro_batch(self) -> int:
        """Samples in one micro-batch."""
        return self.global_batch // (self.accumulation * self.data_ranks)

    @property
    def sums(self) -> str:
        """The precision in which a rank sums the gradients of its micro-batches."""
        return self.how.sums_of(self.precision)

    @property
    def full_precision(self) -> str:
        """The precision with its sums and states, as a key of `precision_sections`."""
        return self.how.full_precision(self.precision)

    @property
    def deepspeed(self) -> Json:
        """The DeepSpeed JSON of this cell, before it is resolved."""
        return self.how.json(self.full_precision, self.sizes, self.scaling)

    def plan(self, world: World, configs: Path, optim: Json, **train: Any) -> Plan:
        """Return the plan of one rank, made in the same way as for every run.

        `configs`: a folder with ARCHITECTURE.config.json. `optim`, `train`: keys of these sections.
        """
        from harness.config.run_config import RunConfig
        from harness.plan.make import make_plan

        model = {
            "name": str(configs / f"{self.architecture}.config.json"),
            "attention": "varlen" if self.how.varlen else ATTENTION.get(self.architecture, "sdpa"),
            "compile": self.how.compiled,
            "kernels": "none",
            "loss_chunk": self.how.loss_chunk,
            **self.how.model,
        }
        train = {
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "steps": STEPS,
            "objective": self.how.objective,
            **train,
        }
        sections = {
            "model": model,
            "data": {"seq_len": self.seq_len},
            "train": train,
            "optim": {"schedule": "constant", "warmup_steps": 0, **optim},
            "eval": {"samples": HELD_OUT_SAMPLES},
        }
        run = RunConfig.model_validate(sections)
        return make_plan(run, self.deepspeed, world, estimating=self.estimating)


class Side(Cell):
    """One side of a round trip of the checkpoint gate. fp32 sums select BF16_Optimizer."""

    sizes = Sizes(bucket=4096, live=20_000, sub_group=20_000, persistence=0)
    # The first step overflows; the scale is doubled again after the save.
    scaling: ClassVar[Json] = {"initial_scale_power": 32, "hysteresis": 1, "loss_scale_window": 3}

    @classmethod
    def of(cls, precision: str, architecture: str, name: str) -> Side:
        """Return the side of a name, LAYOUTxRANKS."""
        layout, _, ranks = name.rpartition("x")
        return cls(architecture, layout, precision, 2, int(ranks))

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return f"{self.layout}x{self.ranks}"

    @property
    def is_sound(self) -> bool:
        """True if it trains correctly in its precision."""
        if self.how.bf16_sums:
            return self.precision == "bf16"
        if self.layout in ("zero0", "zeropp"):
            return self.precision == "fp32"  # enough for zeropp, which partitions as zero3 does
        return not (self.how.pipeline > 1 and self.how.stage == 0) or self.precision != "fp16"


@dataclass(frozen=True)
class Trip:
    """A round trip of a model: saved by `source`, loaded and saved again by `target`."""

    source: Side
    target: Side

    @classmethod
    def of(cls, precision: str, architecture: str, *sides: str) -> Trip:
        """Return the round trip between two sides, given by their names."""
        return cls(*(Side.of(precision, architecture, side) for side in sides))

    @property
    def precision(self) -> str:
        """Precision of both sides."""
        return self.source.precision

    @property
    def architecture(self) -> str:
        """Model of both sides."""
        return self.source.architecture

    @property
    def layouts(self) -> tuple[str, str]:
        """Layouts of the source and of the target."""
        return self.source.layout, self.target.layout

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return f"{self.precision}-{self.architecture}-{self.source.name}-{self.target.name}"

    @property
    def same(self) -> bool:
        """True if the layout does not change, so that losses must be bit-equal."""
        return self.source == self.target


@dataclass(frozen=True)
class Case(Cell):
    """A cell of the memory gate. Its name leaves out the model and the ranks, which follow from the
    layout, and its precision says in which one gradients are summed.
    """

    optimizer: str = "adamw"

    sizes: ClassVar[Sizes] = Sizes(bucket=20_000, live=100_000, sub_group=60_000, persistence=100)
    scaling: ClassVar[Json] = {"initial_scale_power": 4}
    seq_len: ClassVar[int] = 16
    estimating: ClassVar[bool] = True

    @classmethod
    def of(cls, layout: str, precision: str, accumulation: int, optimizer: str = "adamw") -> Case:
        """Return a case, on as many ranks as share one model and its experts' replicas."""
        how = Layout.named(layout)
        is_mixture = how.expert > 1
        ranks = max(2, how.pipeline * how.tensor, 2 * how.expert * is_mixture)
        model = MEASURED_AS[is_mixture]
        return cls(model, layout, precision, accumulation, ranks, optimizer)

    @property
    def name(self) -> str:
        """Name in tables and files."""
        optimizer = () if self.optimizer == "adamw" else (self.optimizer,)
        return "-".join((self.layout, self.precision, str(self.accumulation), *optimizer))

    @property
    def global_batch(self) -> int:
        """Samples in one step: one in every micro-batch."""
        return self.accumulation * self.data_ranks

    @property
    def full_precision(self) -> str:
        """The precision."""
        return self.precision

    @property
    def axis(self) -> Axis:
        """Axis along which the ranks differ: "data", or the axis of the layout."""
        axes: tuple[Axis, ...] = ("pipeline", "tensor", "sequence")
        return next((axis for axis in axes if getattr(self.how, axis) > 1), "data")

    @property
    def is_divided(self) -> bool:
        """True if tensors, rows or experts are divided."""
        return self.axis in ("tensor", "sequence") or self.how.expert > 1

    @property
    def counts_saved(self) -> bool:
        """True if bytes saved for the backward pass are also counted."""
        chunked = self.how.loss_chunk and self.how.pipeline == 1
        return self.is_divided or bool(self.how.model or chunked)


@dataclass(frozen=True)
class Job:
    """What worker.py does with a cell, optionally with a planted defect."""

    cell: Cell
    defect: str | None = None
    folder: str = "."
    """Folder of the result, relative to the output folder."""
    verb: str = "train"
    """train: learn for the parity gate. save: train and save. resume: load what `source` saved,
    save again and continue. hold: count live bytes.
    """
    source: Side | None = None
    micro_batch: int = 0
    """Samples in a micro-batch; 0 for the cell's own. Otherwise, `resume` only trains, to show the
    effect of another order of sums.
    """

    @property
    def saved(self) -> str:
        """Folder of the first save, relative to the output folder."""
        side = self.source or self.cell
        return f"saved/{side.precision}-{side.architecture}-{side.name}"

    @property
    def result(self) -> str:
        """File of the result, relative to the output folder, without its suffix."""
        if self.verb == "save":
            return self.saved
        name = Trip(self.source, self.cell).name if self.source else self.cell.name
        return f"{self.folder}/{name}" + (f"-micro-{self.micro_batch}" if self.micro_batch else "")

    @property
    def label(self) -> str:
        """Line for the terminal."""
        planted = f" with {self.defect}" if self.defect else ""
        return f"{self.verb} {self.result.removeprefix(f'{self.folder}/')}{planted}"

    @property
    def group(self) -> tuple[int, int]:
        """The jobs that one process group can do, in this order: (place, ranks).

        Saves come before they are loaded, on any number of ranks. Live bytes of divided tensors are
        counted last: DeepSpeed keeps state about tensor parallelism in globals.
        """
        is_late = self.verb == "resume" or (self.verb == "hold" and self.cell.how.tensor > 1)
        return int(is_late), self.cell.ranks


def covering(candidates: Iterable[C], covers: Callable[[C], set[Any]]) -> list[C]:
    """Return a small set of cells that covers everything that the candidates cover.

    Greedy: repeatedly take the cell that covers most of the uncovered properties.
    """
    covered_by = {cell: covers(cell) for cell in candidates}
    uncovered = set().union(*covered_by.values())
    chosen = []
    while uncovered:
        best = max(covered_by, key=lambda cell: len(covered_by[cell] & uncovered))
        chosen.append(best)
        uncovered -= covered_by[best]
    return chosen
