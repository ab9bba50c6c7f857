"""Runs half a round trip on one rank: train and save; or load, save again and continue."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.checkpoint.index import BUFFER, WEIGHT
from harness.checkpoint.manifest import Manifest, TrainState
from harness.checkpoint.save import Saver
from harness.checkpoint.store import Checkpoint, Retention, Store, verified
from harness.config.run_config import RunConfig
from harness.data.batches import share_of_rank
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.run.resumption import load_into
from tests.gates.cells import GLOBAL_BATCH
from tests.gates.checkpoints.cells import BLANK_SEED, Cell, Side, built_as
from tests.gates.checkpoints.compare import differences
from tests.gates.checkpoints.defects import planted
from tests.gates.jobs import compute_alike
from tests.gates.models import SEQ_LEN
from tests.gates.parity.recipe import (
    BETAS,
    CLIP_NORM,
    EPS,
    LR,
    WEIGHT_DECAY,
    global_batch,
    rows,
    targets,
)


@dataclass(frozen=True)
class Job:
    """Half a round trip. Without a target the source saves; otherwise the target loads.

    With its own `micro_batch`, a loading job only trains, to show the effect of another order of
    sums.
    """

    precision: str
    architecture: str
    source: Side
    target: Side | None = None
    micro_batch: int = 0
    defect: str | None = None

    @property
    def side(self) -> Side:
        """The side whose ranks run the job."""
        return self.target or self.source

    @property
    def saved(self) -> str:
        """Folder of the first save, relative to the output folder."""
        return f"saved/{self.precision}-{self.architecture}-{self.source.name}"

    @property
    def result(self) -> str:
        """File of the result, relative to the output folder."""
        if self.target is None:
            return f"{self.saved}.json"
        cell = Cell(self.precision, self.architecture, self.source, self.target)
        split = f"-micro-{self.micro_batch}" if self.micro_batch else ""
        planted = f" with {self.defect}" if self.defect else ""
        return f"{cell.name}{split}{planted}.json"

    @property
    def label(self) -> str:
        """Label of the job on a terminal."""
        return self.result.removesuffix(".json")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Return the job from the JSON of `asdict`."""
        target = values["target"] and Side(**values["target"])
        return cls(**{**values, "source": Side(**values["source"]), "target": target})


STEPS_BEFORE, STEPS_AFTER = 3, 3
FP16_SCALE = 2.0**10  # far below the scale at which any layout overflows, after the step that did


@dataclass
class Trip:
    """Results of one half of a round trip. Numbers are hex, equal only if every bit is."""

    losses: list[str] = field(default_factory=list)  # of the steps after the checkpoint
    norms: list[str] = field(default_factory=list)
    scales: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)  # between the two checkpoints


@dataclass(frozen=True)
class Place:
    """This rank of one side of a round trip, with a model in a precision."""

    precision: str
    architecture: str
    side: Side
    world: World
    device: torch.device
    configs: Path
    """A folder with ARCHITECTURE.config.json."""
    micro_batch: int = 0
    """Samples; 0 for the side's own."""

    def engine(self, seed: int) -> Any:
        """Return a new engine; with BLANK_SEED, one that expects a checkpoint."""
        from tests.gates.engines import build_engine

        with built_as(self.architecture):
            return build_engine(self._plan(seed), self.device, blank=seed == BLANK_SEED)

    def train(self, engine: Any, first_step: int, steps: int, trip: Trip) -> None:
        """Take steps and record their results."""
        for step in range(first_step, first_step + steps):
            batch, rank = global_batch(step), engine.plan.grid.coords(self.world.rank).data
            micro, data_ranks = engine.plan.micro_batch, self.side.data_ranks
            share = share_of_rank(0, GLOBAL_BATCH, micro, rank, data_ranks)
            torch.manual_seed(1000 * step + self.world.rank)  # new dropout seed, as in a run
            done = engine.train_batch([rows(batch, s.tolist()) for s in share], targets(batch), LR)
            trip.losses.append(float(engine.sum_over_ranks(done.loss_share)).hex())
            trip.norms.append(float(done.grad_norm).hex())
            trip.scales.append(engine.loss_scale.hex())

    def _plan(self, seed: int) -> Plan:
        model = {"name": str(self.configs / f"{self.architecture}.config.json")}
        micro = self.micro_batch or self.side.micro_batch
        train = {"global_batch": GLOBAL_BATCH, "micro_batch": micro, "seed": seed, "steps": 20}
        optim = {"name": "adamw", "lr": LR, "betas": BETAS, "eps": EPS, "clip_norm": CLIP_NORM}
        optim |= {"weight_decay": WEIGHT_DECAY, "schedule": "constant", "warmup_steps": 0}
        sections = {"model": model, "data": {"seq_len": SEQ_LEN}, "train": train, "optim": optim}
        run = RunConfig.model_validate(sections)
        return make_plan(run, self.side.deepspeed(self.precision), self.world)


def save_half(place: Place, folder: Path) -> Trip:
    """Train, save into `folder`, and continue."""
    with contextlib.closing(place.engine(seed=0)) as engine:
        trip = Trip()
        first = 0
        if place.precision == "fp16":
            place.train(engine, 0, 1, trip)
            assert engine.skipped_steps == 1, "the first step was to overflow"
            # Twenty more steps would reach the same scale.
            engine.restore_scalars({**_NOTHING, "loss_scaling": {"cur_scale": FP16_SCALE}})
            first = 1
        place.train(engine, first, STEPS_BEFORE - first, trip)
        save(engine, folder)
        trip = Trip(differences=_missing(engine, verified(folder / "step-00000003")))
        place.train(engine, STEPS_BEFORE, STEPS_AFTER, trip)
    return trip


_NOTHING: dict[str, dict[str, Any]] = {"counters": {}, "loss_scaling": {}, "optimizer": {}}


def load_half(place: Place, folder: Path, again: Path | None) -> Trip:
    """Load the checkpoint in `folder`, save it into `again`, compare the two, and continue."""
    with contextlib.closing(place.engine(seed=BLANK_SEED)) as engine:
        saved = verified(folder / "step-00000003")
        load_into(engine, saved)
        trip = Trip()
        if again is not None:
            save(engine, again)
            second = verified(again / "step-00000003")
            trip.differences = gathered(differences(saved, second, *_turn()))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(again)
        place.train(engine, STEPS_BEFORE, STEPS_AFTER, trip)
    return trip


def save(engine: Any, folder: Path) -> None:
    """Save as a run does, but without a run."""
    plan = engine.plan
    manifest = Manifest(
        state=TrainState(STEPS_BEFORE),
        precision=plan.precision,
        model_config=plan.model_config,
        data_fingerprint=None,
        engine=engine.scalars(),
        probe_loss=None,
        held_out_loss=None,
        about={"deepspeed": plan.deepspeed},
    )
    saver = Saver(Store(folder), plan.world.rank, Retention())
    saver.start(manifest, engine.fragments(), {}, background=False)
    saver.finish()


def gathered(lines: list[str]) -> list[str]:
    """Return the distinct lines of all ranks. Collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, lines)
    return sorted({item for items in by_rank for item in items})


def _missing(engine: Any, saved: Checkpoint) -> list[str]:
    """Return the tensors of the model and its optimizer that the checkpoint lacks."""
    reader, lines = saved.reader(), []
    expected = {
        name: {WEIGHT, "exp_avg", "exp_avg_sq"} if p.requires_grad else {WEIGHT}
        for name, p in engine.module.named_parameters()
    }
    persistent = engine.module.state_dict().keys()
    expected |= {name: {BUFFER} for name, _ in engine.module.named_buffers() if name in persistent}
    for name in sorted({*expected, *reader.index}):
        kinds = {frozenset(entry.kinds) for entry in reader.index.entries(name)}
        if kinds != {frozenset(expected.get(name, ()))}:
            lines.append(f"{name} is there as {sorted(map(sorted, kinds))}")
    for name, kinds in expected.items():
        if "exp_avg" in kinds and not reader.whole(name, "exp_avg").any():
            lines.append(f"{name} was never trained")
    return lines


def _turn() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def do(job: Job, world: World, device: torch.device, out: Path) -> None:
    """Do one job on this rank; rank 0 writes its result."""
    compute_alike()
    place = Place(job.precision, job.architecture, job.side, world, device, out, job.micro_batch)
    if job.target is None:
        trip = save_half(place, out / job.saved)
    else:
        again = None if job.micro_batch else out / "again" / job.label
        with planted(job.defect):
            trip = load_half(place, out / job.saved, again)
    if world.rank == 0:
        (out / job.result).write_text(json.dumps(asdict(trip)))
