"""Measures a step of one long sample, on one rank."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import torch

from harness.data.batch import Batch
from harness.layout.world import World
from harness.run.live_memory import live_storages
from tools.proofs.ladder.rungs import DOCUMENT, Job
from tools.proofs.memory.live import rise


def do(job: Job, world: World, device: torch.device, out: Path) -> None:
    """Train a short sample, then a long one; keep the second peak and CPU seconds."""
    from tools.proofs.engines import build_engine

    before = live_storages()
    plan = job.plan(world, out)
    engine = build_engine(plan, device, document_mask=True)
    for tokens in (2 * DOCUMENT, job.tokens):  # Adam's moments are made in the first step
        ids = torch.randint(0, plan.model_config["vocab_size"], (1, tokens))
        batch = Batch(ids, ids.clone(), (torch.arange(tokens) % DOCUMENT)[None])
        gc.collect()
        before_step = sum(
            s.nbytes() for key, (s, _) in live_storages().items() if key not in before
        )
        began = os.times()
        with rise() as rose:
            engine.accumulate([batch], tokens)
        seconds = os.times().user - began.user
        engine.apply(1e-4)
    engine.close()
    measured = {"bytes": before_step + rose.bytes, "cpu_s": seconds}
    (out / f"{job.label}.rank{world.rank}.json").write_text(json.dumps(measured))
