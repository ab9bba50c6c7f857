"""Times the steps of a case, on one rank."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from harness.config.run_config import RunConfig
from harness.data.batch import Batch
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from tools.proofs.step_times.cases import Case

Job = Case
_STARTING, _TIMED = 2, 7


def plan_of(case: Case, world: World, folder: Path) -> Plan:
    """Return the plan of a case, through the same door as every run's."""
    path = folder / f"{case.model}.json"
    path.write_text(json.dumps(case.config))
    run = RunConfig.model_validate(
        {
            "model": {"name": str(path), "checkpointing": case.checkpointing},
            "data": {"seq_len": case.seq_len},
            "train": {
                "global_batch": case.accumulation * case.micro_batch * case.data,
                "micro_batch": case.micro_batch,
                "steps": 2,
            },
            "optim": {"warmup_steps": 0},
        }
    )
    return make_plan(run, case.deepspeed, world, estimating=True)


def do(case: Case, world: World, device: torch.device, out: Path) -> None:
    """Time one case; rank 0 keeps the seconds of each step."""
    from tools.proofs.engines import build_engine

    torch.manual_seed(0)
    folder = out / f"rank{world.rank}"
    folder.mkdir(exist_ok=True)
    plan = plan_of(case, world, folder)
    engine = build_engine(plan, device)
    generator = torch.Generator().manual_seed(plan.share.data_rank)
    size = (case.micro_batch, case.seq_len)
    ids = [
        torch.randint(0, plan.model_config["vocab_size"], size, generator=generator)
        for _ in range(plan.grad_accum)
    ]
    batches = [Batch(each, each.clone(), None) for each in ids]
    seconds = []
    for _ in range(_STARTING + _TIMED):
        dist.barrier()
        began = time.perf_counter()
        engine.accumulate(batches, case.seq_len * plan.global_batch)
        engine.apply(1e-4)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    engine.close()
    if world.rank == 0:
        (out / f"{case.name}.json").write_text(json.dumps(seconds[_STARTING:]))
