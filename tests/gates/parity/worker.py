"""Trains a cell with the real engine on one rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from harness.config.run_config import RunConfig
from harness.data import batches
from harness.data.batch import Batch
from harness.layout.world import World
from harness.loop import Run, evaluate
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.steps import dropout_seed
from tests.gates.cells import GLOBAL_BATCH
from tests.gates.jobs import compute_alike
from tests.gates.models import ATTENTION, SEQ_LEN
from tests.gates.parity import recipe
from tests.gates.parity.cells import STEPS, Cell, Job
from tests.gates.parity.defects import planted
from tests.gates.parity.measure import Trajectory
from tests.gates.parity.recipe import (
    SEED,
    SGD_LR,
    global_batch,
    held_out,
    learning_rate,
    rows,
    targets,
)

if TYPE_CHECKING:
    from harness.engine.zero import ZeroEngine

ADAMW = {
    "name": "adamw",
    "lr": recipe.LR,
    "betas": recipe.BETAS,
    "eps": recipe.EPS,
    "weight_decay": recipe.WEIGHT_DECAY,
    "clip_norm": recipe.CLIP_NORM,
    "groups": [
        {
            "pattern": recipe.GROUP_PATTERN,
            "lr_multiplier": recipe.GROUP_LR_MULTIPLIER,
            "weight_decay": recipe.GROUP_WEIGHT_DECAY,
        }
    ],
}


def make_cell_plan(cell: Cell, world: World, folder: Path, optim: dict[str, Any]) -> Plan:
    """Return the plan of one cell, made in the same way as for every run."""
    run = RunConfig.model_validate(
        {
            "model": {
                "name": str(folder / f"{cell.architecture}.config.json"),
                "attention": (
                    "varlen" if cell.how.varlen else ATTENTION.get(cell.architecture, "sdpa")
                ),
                "compile": cell.how.compiled,
                "loss_chunk": cell.how.loss_chunk,
                **cell.how.model,
            },
            "data": {"seq_len": SEQ_LEN},
            "train": {
                "global_batch": GLOBAL_BATCH,
                "micro_batch": cell.micro_batch,
                "seed": SEED,
                "steps": STEPS,
            },
            "optim": {"schedule": "constant", "warmup_steps": 0, **optim},
            "eval": {"samples": recipe.HELD_OUT_SAMPLES},
        }
    )
    return make_plan(run, cell.deepspeed, world)


def train_cell(cell: Cell, world: World, device: torch.device, folder: Path) -> Trajectory:
    """Return the gradients and one SGD step of one engine, and 20 AdamW steps and an evaluation of
    another.
    """
    from tests.gates.engines import build_engine

    if cell.how.compiled:
        # Dynamo counts recompilations of a decoder layer over all engines of a process. After the
        # eighth it stops compiling the layer, and half precision then rounds differently.
        torch.compiler.reset()
    result = Trajectory()
    sgd = {"name": "sgd", "lr": SGD_LR, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
    engine = build_engine(make_cell_plan(cell, world, folder, sgd), device)
    before = dict(engine.masters())
    batch = global_batch(0)
    drawn_as = engine.plan.share.dropout_rank
    torch.manual_seed(dropout_seed(SEED, 0, drawn_as))
    engine.accumulate(_share(batch, cell, world.rank), targets(batch))
    result.gradients = dict(engine.gradients())
    engine.apply(SGD_LR)
    result.sgd_changes = {name: after - before[name] for name, after in engine.masters()}
    engine.close()

    engine = build_engine(make_cell_plan(cell, world, folder, ADAMW), device)
    for step in range(STEPS):
        batch = global_batch(step)
        mine, count = _share(batch, cell, world.rank), targets(batch)
        torch.manual_seed(dropout_seed(SEED, step, drawn_as))
        done = engine.train_batch(mine, count, learning_rate(step))
        result.losses.append(float(engine.sum_over_ranks(done.loss_share)))
        result.norms.append(float(done.grad_norm))
    result.held_out = _held_out_loss(engine)
    engine.close()
    return result


def _held_out_loss(engine: ZeroEngine) -> float:
    """Return the loss evaluated as in every run, with a minimal run around it."""
    run = SimpleNamespace(
        plan=engine.plan,
        data=SimpleNamespace(held_out=_HeldOut()),
        engine=engine,
        state=SimpleNamespace(step=STEPS),
        pulse=lambda *_: None,
        stop_asked=lambda: (False, False),
        meter=SimpleNamespace(restart=lambda: None),
        sum=lambda values, over: Run.sum(cast(Run, run), values, over),
    )
    loss = evaluate(cast(Run, run))
    assert loss is not None
    return loss


class _HeldOut:
    """The held-out samples as a stream that repeats."""

    samples = at_once = recipe.HELD_OUT_SAMPLES
    seq_len = SEQ_LEN

    def batch(self, first_sample: int, micro_batch: int) -> Batch:
        """Return consecutive samples."""
        every = range(first_sample, first_sample + micro_batch)
        return rows(held_out(), [sample % self.samples for sample in every])


def _share(batch: Any, cell: Cell, rank: int) -> list[Any]:
    """Return this rank's micro-batches of a global batch, distributed as in every run."""
    # Pipeline stages are the outer axis.
    data_rank = rank // (cell.how.tensor * cell.how.sequence) % cell.data_ranks
    share = batches.share_of_rank(0, GLOBAL_BATCH, cell.micro_batch, data_rank, cell.data_ranks)
    return [rows(batch, samples.tolist()) for samples in share]


def do(job: Job, world: World, device: torch.device, out: Path) -> None:
    """Train a job's cell; rank 0 writes the trajectory to its folder."""
    compute_alike()
    with planted(job.defect, world):
        trained = train_cell(job.cell, world, device, out)
    if world.rank == 0:
        (out / job.folder).mkdir(exist_ok=True)
        trained.save(out / job.folder / job.cell.name)
