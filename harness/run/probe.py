"""The probe: a few held-out samples; a checkpoint records their loss, a resume compares it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

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
    """Return the first held-out samples; with a carried state, those of one text."""
    return data.held_out.first(SAMPLES)


def as_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """Return a batch as the tensors that a checkpoint stores."""
    tensors = {"input_ids": batch.input_ids, "labels": batch.labels}
    if batch.position_ids is not None:
        tensors["position_ids"] = batch.position_ids
    if batch.goes_on is not None:
        tensors["goes_on"] = batch.goes_on.long()
    return tensors


def stored_probe(checkpoint: Checkpoint) -> Batch:
    """Return the probe batch that a checkpoint stores."""
    tensors = checkpoint.probe()
    ids, labels, positions = (tensors.get(n) for n in ("input_ids", "labels", "position_ids"))
    assert ids is not None, "a probe has tokens"
    assert labels is not None, "and targets"
    if "goes_on" not in tensors:
        return Batch(ids, labels, positions)
    goes_on, windows = tensors["goes_on"].bool(), torch.arange(len(labels))
    return Batch(ids, labels, positions, windows=windows, goes_on=goes_on)


def texts_of(probe: Batch) -> Iterator[Batch]:
    """Yield the rows of a probe batch one by one, those of one text as one long row: what a model
    computes that carries no state.
    """
    begins, rows = torch.ones(len(probe.labels), dtype=torch.bool), len(probe.labels)
    if probe.goes_on is not None:
        begins = ~probe.goes_on
    starts = [0, *(row for row in range(1, rows) if begins[row]), rows]
    for start, end in itertools.pairwise(starts):
        parts = (probe.input_ids, probe.labels, probe.position_ids)
        ids, labels, positions = (
            None if part is None else part[start:end].reshape(1, -1) for part in parts
        )
        assert ids is not None, "a probe has tokens"
        assert labels is not None, "and targets"
        yield Batch(ids, labels, positions)


def loss_of(engine: Engine, batch: Batch) -> float | None:
    """Return the mean loss in nats over a batch's targets, None without any. Collective.

    All data ranks run equally often: padding samples are masked out. Samples of one text are
    computed one after the other.
    """
    plan, samples, parts = engine.plan, len(batch.labels), list[Batch]()
    at_once = samples if batch.goes_on is None else 1
    for start in plan.share.starts(at_once, plan.micro_batch):
        rows = torch.arange(start, start + plan.micro_batch)
        for first in range(0, samples, at_once):
            places = first + rows % at_once
            labels = batch.labels[places].clone()
            labels[rows >= at_once] = -100
            others = (batch.position_ids, batch.windows, batch.goes_on)
            positions, windows, goes_on = (None if t is None else t[places] for t in others)
            ids = batch.input_ids[places]
            parts.append(Batch(ids, labels, positions, windows=windows, goes_on=goes_on))
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
