"""One rank of the engine's checks: its engines and batches. Importing this joins the ranks."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness.config.run_config import RunConfig
from harness.data.batch import Batch
from harness.engine.processes import ending_together, join
from harness.layout.world import World
from harness.plan.make import make_plan
from tests.engine.small import SEQ_LEN, run_config

WORLD = World.from_environ()
DEVICE = join(WORLD)
OUT = Path(sys.argv[1])
STAGES = (0, 1, 2, 3)
# ZeRO-3 that really partitions: no parameter is small enough to stay whole.
SPLIT = {"stage3_param_persistence_threshold": 0}


def run_checks(checks: Iterable[Callable[[], Any]]) -> None:
    """Write what each check returns, or its traceback, to OUT/NAME.RANK.json; the ranks end
    together.
    """
    with ending_together():
        for check in checks:
            began = time.monotonic()
            try:
                result = {"value": check()}
            except Exception:
                result = {"error": traceback.format_exc()}
            end = "failed" if "error" in result else "ended"
            print(f"{check.__name__} {end} after {time.monotonic() - began:.1f} s", flush=True)
            (OUT / f"{check.__name__}.{WORLD.rank}.json").write_text(json.dumps(result))


def engine_of(ds: dict[str, Any], **sections: dict[str, Any]) -> Any:
    from tools.proofs.engines import build_engine  # imports DeepSpeed

    run = RunConfig.model_validate(run_config(OUT, **sections))
    return build_engine(make_plan(run, ds, WORLD), DEVICE)


def stage(number: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, **(SPLIT if number == 3 else {})}}


def fp16(**knobs: float) -> dict[str, Any]:
    """A scale that overflows at once, and is halved at once."""
    settings = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1, **knobs}
    return {"zero_optimization": {"stage": 1}, "fp16": settings}


def all_batches(step: int = 0) -> list[Batch]:
    """The four micro-batches of two samples that all ranks train on together."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 24, (8, SEQ_LEN + 1), generator=generator)
    rows = ids.split(2)
    return [Batch(r[:, :-1].contiguous(), r[:, 1:].clone(), None) for r in rows]


def batches(step: int = 0) -> tuple[list[Batch], int]:
    """This rank's two micro-batches where every rank is a data rank, and the targets of all."""
    return all_batches(step)[WORLD.rank :: WORLD.world_size], 8 * SEQ_LEN


def share_of(engine: Any, step: int = 0) -> tuple[list[Batch], int]:
    """The micro-batches of this rank's data rank, and the targets of all."""
    grid = engine.plan.grid
    return all_batches(step)[grid.coords(WORLD.rank).data :: grid.data], 8 * SEQ_LEN


def losses(engine: Any, steps: int, lr: float = 3e-3) -> list[float]:
    """The global batch's mean loss of each step; always the same batch, so that it falls."""
    means = []
    for _ in range(steps):
        result = engine.train_batch(*share_of(engine), lr)
        means.append(float(engine.sum_over_ranks(result.loss_share.clone())))
    return means


def save(name: str, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    gathered = dict(tensors)  # collective
    if WORLD.rank == 0:
        save_file(gathered, OUT / f"{name}.safetensors")
