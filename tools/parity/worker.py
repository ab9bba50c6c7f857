"""One rank of a process group that trains cell after cell with the real engine."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from harness.config import RunConfig
from harness.data.batches import share_of_rank
from harness.engine.processes import join, leave
from harness.plan import Plan, make_plan
from harness.planning.world import World
from tools.parity.cells import ATTENTION, GLOBAL_BATCH, SEQ_LEN, STEPS, Cell, Job
from tools.parity.defects import planted
from tools.parity.measure import Trajectory
from tools.parity.recipe import BETAS, CLIP_NORM, EPS, LR, SEED, SGD_LR, WEIGHT_DECAY
from tools.parity.samples import global_batch, rows, targets


def make_cell_plan(cell: Cell, world: World, folder: Path, optim: dict[str, Any]) -> Plan:
    """The Plan of one cell, through the same door as every run."""
    run = RunConfig.model_validate(
        {
            "model": {
                "name": str(folder / f"{cell.architecture}.config.json"),
                "attention": ATTENTION.get(cell.architecture, "sdpa"),
            },
            "data": {"seq_len": SEQ_LEN},
            "train": {
                "global_batch": GLOBAL_BATCH,
                "micro_batch": cell.micro_batch,
                "seed": SEED,
                "steps": STEPS,
            },
            "optim": {"schedule": "constant", "warmup_steps": 0, **optim},
        }
    )
    return make_plan(run, cell.deepspeed, world)


def train_cell(cell: Cell, world: World, device: torch.device, folder: Path) -> Trajectory:
    """Gradients and one SGD step with one engine, then 20 AdamW steps with another."""
    from harness.engine.build import build_engine

    result = Trajectory()
    sgd = {"name": "sgd", "lr": SGD_LR, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
    engine = build_engine(make_cell_plan(cell, world, folder, sgd), device)
    before = dict(engine.masters())
    batch = global_batch(0)
    engine.accumulate(_share(batch, cell, world.rank), targets(batch))
    result.gradients = dict(engine.gradients())
    engine.apply(SGD_LR)
    result.sgd_changes = {name: after - before[name] for name, after in engine.masters()}
    engine.close()

    adamw = {"name": "adamw", "lr": LR, "betas": BETAS, "eps": EPS}
    adamw |= {"weight_decay": WEIGHT_DECAY, "clip_norm": CLIP_NORM}
    engine = build_engine(make_cell_plan(cell, world, folder, adamw), device)
    for step in range(STEPS):
        batch = global_batch(step)
        done = engine.train_batch(_share(batch, cell, world.rank), targets(batch), LR)
        result.losses.append(float(engine.sum_over_ranks(done.loss_share)))
        result.norms.append(float(done.grad_norm))
    engine.close()
    return result


def _share(batch: Any, cell: Cell, rank: int) -> list[Any]:
    """This rank's micro-batches of a global batch, dealt as in every run."""
    data_rank = rank % cell.data_ranks  # pipeline stages are the outer axis
    share = share_of_rank(0, GLOBAL_BATCH, cell.micro_batch, data_rank, cell.data_ranks)
    return [rows(batch, samples.tolist()) for samples in share]


def main() -> None:
    """Train the jobs of a file, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=Path, required=True, help="JSON list of jobs")
    parser.add_argument("--out", type=Path, required=True, help="folder of the trajectories")
    args = parser.parse_args()
    jobs = [
        Job(Cell(**values["cell"]), values["defect"], values["folder"])
        for values in json.loads(args.jobs.read_text())
    ]
    world = World.from_environ()
    device = join(world)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # else every bucket is filled
    try:
        for number, job in enumerate(jobs, 1):
            began = time.perf_counter()
            try:
                with planted(job.defect, world):
                    found = train_cell(job.cell, world, device, args.out)
            except Exception:
                # The other rank may wait in a collective: the whole group ends here.
                (args.out / f"{job.cell.name}.{world.rank}.error").write_text(
                    traceback.format_exc()
                )
                raise
            if world.rank == 0:
                (args.out / job.folder).mkdir(exist_ok=True)
                found.save(args.out / job.folder / job.cell.name)
                seconds = time.perf_counter() - began
                planted_too = f" with {job.defect}" if job.defect else ""
                done = f"{number}/{len(jobs)} trained {job.cell.name}{planted_too}"
                print(f"  {done} in {seconds:.1f} s", flush=True)
    finally:
        leave()


if __name__ == "__main__":
    main()
