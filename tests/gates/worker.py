"""Does a job on one rank: trains a cell with the real engine, or what resume.py and hold.py do."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from harness.data.batch import Batch
from harness.layout.world import World
from harness.loop import Run, evaluate
from harness.steps import dropout_seed
from tests.gates import hold, recipe, resume
from tests.gates.cell import HELD_OUT_SAMPLES, STEPS, Job
from tests.gates.defects import planted
from tests.gates.engines import batch_of, build_engine, share_of, take_steps
from tests.gates.jobs import compute_alike
from tests.gates.models import SEQ_LEN
from tests.gates.recipe import held_out, learning_rate, paired, rows, targets
from tests.gates.trajectory import Trajectory

if TYPE_CHECKING:
    from harness.engine.api import Engine

GROUP = {
    "pattern": recipe.GROUP_PATTERN,
    "lr_multiplier": recipe.GROUP_LR_MULTIPLIER,
    "weight_decay": recipe.GROUP_WEIGHT_DECAY,
}


def do(job: Job, world: World, device: torch.device, out: Path) -> None:
    """Do a job; rank 0 writes its result."""
    verbs = {"train": train, "save": resume.save, "resume": resume.resume, "hold": hold.hold}
    if job.verb != "hold":
        compute_alike()
    with planted(job.defect, world):
        result = verbs[job.verb](job, world, device, out)
    if world.rank == 0:
        path = out / job.result
        path.parent.mkdir(exist_ok=True)
        if isinstance(result, Trajectory):
            result.save(path)
        else:
            Path(f"{path}.json").write_text(json.dumps(result))


def train(job: Job, world: World, device: torch.device, out: Path) -> Trajectory:
    """Return one engine's gradients and SGD step, and another's 8 AdamW steps and evaluation."""
    cell, result = job.cell, Trajectory()
    if cell.how.compiled:
        # Dynamo counts recompilations of a decoder layer over all engines of a process. After the
        # eighth it stops compiling the layer, and half precision then rounds differently.
        torch.compiler.reset()
    lr = recipe.SGD_LR
    sgd = {"name": "sgd", "lr": lr, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
    engine: Any
    with contextlib.closing(build_engine(cell.plan(world, out, sgd), device)) as engine:
        before = dict(engine.masters())
        batch = batch_of(engine, 0)
        torch.manual_seed(dropout_seed(recipe.SEED, 0, engine.plan.share.dropout_rank))
        engine.accumulate(share_of(engine.plan, batch), targets(batch))
        result.gradients = dict(engine.gradients())
        engine.apply(lr)
        result.sgd_changes = {name: after - before[name] for name, after in engine.masters()}
    adamw = {**recipe.ADAMW, "groups": [GROUP]}
    with contextlib.closing(build_engine(cell.plan(world, out, adamw), device)) as engine:
        take_steps(engine, range(STEPS), learning_rate, result)
        pairs = bool(engine.plan.config.train.preferences)
        result.held_out = held_out_loss(engine, _HeldOut(pairs))
    return result


def held_out_loss(engine: Engine, held_out: object) -> float:
    """Return the loss evaluated as in every run, with a minimal run around it."""
    run = SimpleNamespace(
        plan=engine.plan,
        data=SimpleNamespace(held_out=held_out),
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

    samples = at_once = HELD_OUT_SAMPLES
    seq_len = SEQ_LEN

    def __init__(self, pairs: bool) -> None:
        self._held_out = paired(held_out()) if pairs else held_out()

    def batch(self, first_sample: int, micro_batch: int) -> Batch:
        """Return consecutive samples."""
        every = range(first_sample, first_sample + micro_batch)
        return rows(self._held_out, [sample % self.samples for sample in every])
