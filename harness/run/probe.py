"""The probe: a few held-out samples; a checkpoint records their loss, a resume compares it."""

from __future__ import annotations

import math

import torch

from harness.checkpoint.find import Checkpoint
from harness.data.batch import Batch
from harness.data.data import Data
from harness.engine.api import Engine
from harness.errors import NoCheckpoint
from harness.plan.plan import Plan

SAMPLES = 8  # a forward pass of one micro-batch on most layouts
# Relative tolerance of the loss: wider than rounding between layouts in the parity gate, narrower
# than the effect of one lost layer.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 1e-3}


def probe_batch(data: Data) -> Batch:
    """Return the first held-out samples."""
    return data.held_out.batch(0, min(SAMPLES, data.held_out.samples))


def as_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """Return a batch as the tensors that a checkpoint stores."""
    tensors = {"input_ids": batch.input_ids, "labels": batch.labels}
    return (
        tensors if batch.position_ids is None else {**tensors, "position_ids": batch.position_ids}
    )


def stored_probe(checkpoint: Checkpoint) -> Batch:
    """Return the probe batch that a checkpoint stores."""
    tensors = checkpoint.probe()
    return Batch(tensors["input_ids"], tensors["labels"], tensors.get("position_ids"))


def loss_of(engine: Engine, batch: Batch) -> float | None:
    """Return the mean loss in nats over a batch's targets, None without any. Collective.

    All data ranks run equally often: padding samples are masked out.
    """
    plan, samples, parts = engine.plan, len(batch.labels), []
    for start in plan.share.starts(samples, plan.micro_batch):
        rows = torch.arange(start, start + plan.micro_batch)
        labels = batch.labels[rows % samples].clone()
        labels[rows >= samples] = -100
        positions = None if batch.position_ids is None else batch.position_ids[rows % samples]
        parts.append(Batch(batch.input_ids[rows % samples], labels, positions))
    loss, tokens = engine.sum_over_ranks(engine.eval_batch(parts)).tolist()
    return loss / tokens if tokens else None


def check_probe(engine: Engine, checkpoint: Checkpoint, plan: Plan) -> None:
    """Compare the probe's loss with the one that the loaded checkpoint recorded. Collective.

    Raises NoCheckpoint with both numbers if they differ.
    """
    expected = checkpoint.manifest.probe_loss
    if expected is None or "probe" in plan.config.resume.allow:
        return
    batch = stored_probe(checkpoint)
    loss = loss_of(engine, batch)
    tolerance = max(TOLERANCES[plan.precision], TOLERANCES[checkpoint.manifest.precision])
    if loss is None or (math.isnan(loss) and math.isnan(expected)):
        return
    if not math.isclose(loss, expected, rel_tol=tolerance):
        raise NoCheckpoint(
            f"{checkpoint.path} was saved with a loss of {expected:.7g} on its probe batch, but it "
            f"is {loss:.7g} here (relative tolerance {tolerance:g}): this is not the model that "
            "was saved, or other versions compute otherwise; resume.allow=probe goes on anyway"
        )
