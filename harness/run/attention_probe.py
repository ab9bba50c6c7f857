"""Entropy and coverage of attention on a few held-out samples, by layer."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.distributed as dist

from harness.data.batch import Batch, on_device
from harness.engine.api import Engine
from harness.models.attention_sums import AttentionSums
from harness.run.run import Run

SAMPLES = 4


def attention_metrics(run: Run) -> dict[str, float]:
    """Return attention_entropy/LAYER and attention_coverage/LAYER, LAYER from 0; none where this
    attention cannot be looked into, which is an event. Collective; waits for the device.

    On the first SAMPLES held-out samples, or on as many as a step trains on: the look is a forward
    pass of at most one step's samples.
    """
    if not run.attention_is_seen:
        return {}
    run.pulse("evaluation", run.state.step)
    rows, why = list[list[float]](), "rows are divided over sequence ranks"
    if run.plan.grid.sequence == 1:
        rows = _sums(run).tolist()
        why = f"{type(run.engine.module).__name__} has another attention"
    run.meter.restart()
    seen = {layer: row for layer, row in enumerate(rows) if row[2]}  # others have no attention
    if not seen or any(math.isnan(value) for row in rows for value in row):
        run.attention_is_seen = False
        run.event("attention_unseen", step=run.state.step, message=f"no attention_*: {why}")
        return {}
    return {
        f"attention_{name}/{layer}": row[number] / row[2]
        for number, name in enumerate(("entropy", "coverage"))
        for layer, row in seen.items()
    }


def _sums(run: Run) -> torch.Tensor:
    plan, stream = run.plan, run.data.held_out
    samples = min(SAMPLES, plan.global_batch, stream.samples)
    batches = [
        (stream.batch(start, plan.micro_batch), torch.arange(start, start + plan.micro_batch))
        for start in plan.share.starts(samples, plan.micro_batch)
    ]
    return attention_sums(run.engine, [(batch, rows < samples) for batch, rows in batches])


def attention_sums(engine: Engine, batches: list[tuple[Batch, torch.Tensor]]) -> torch.Tensor:
    """Return (layers, 3): entropy, coverage, and how many (sample, head, query) they are sums of,
    over all ranks. Collective.

    `batches`: this rank's, each with the samples (micro_batch,) of it that count.
    """
    layers = engine.module.config.get_text_config(decoder=True).num_hidden_layers
    total = torch.zeros(layers, 3, dtype=torch.float64, device=engine.device)
    compiled = engine.plan.config.model.compile  # which would compile this once more
    as_written = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    with as_written:
        for batch, counted in batches:
            sums = AttentionSums(layers, on_device(counted, engine.device))
            with sums.recorded():
                engine.eval_batch([batch])
            total += sums.sums
    dist.all_reduce(total)  # over heads, stages and samples
    return total
