"""A trained cell against the plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from tools.proofs.cells import GLOBAL_BATCH
from tools.proofs.models import LEARNED
from tools.proofs.parity.cells import Cell
from tools.proofs.parity.kept import kept_spread
from tools.proofs.parity.measure import Trajectory, difference, worst_relative
from tools.proofs.parity.reference import Split, Sum, Way, gradients, train
from tools.proofs.parity.report import Row

LEAST_FALL = 0.2  # of the loss over the gate's steps: a model that does not learn proves little


def compare(cell: Cell, out: Path, factor: float) -> Row:
    """Return how far `cell`, trained into `out`, is from the plain loop, and how far it may be."""
    mixture = "num_experts_per_tok" in LEARNED[cell.architecture]
    # A balancing loss is not linear in the micro-batch, which is therefore the cell's own.
    split = Split.even(cell.micro_batch if mixture else GLOBAL_BATCH)
    way = Way(cell.architecture, cell.precision, cell.how.has_bf16_states, cell.how.compiled)
    reference = _reference(way, split)
    fall = 1 - min(reference.losses) / reference.losses[0]
    assert fall >= LEAST_FALL, f"the reference's loss falls by {fall:.0%} only"
    trained = Trajectory.load(out / cell.name)
    distance = difference(trained, reference)
    spread = _spread(way)
    if not cell.how.has_bf16_states:  # whose sums are in bf16: they depend on their order
        by = Sum(
            cell.sums,
            cell.micro_batch,
            cell.data_ranks,
            cell.how.stage >= 2,
            cell.how.pipeline,
        )
        same, order = _gradients(way, by)
        distance = replace(distance, gradient=worst_relative(trained.gradients, same))
        spread = replace(spread, gradient=max(order, torch.finfo(torch.float32).eps))
    tolerance = spread.scaled(factor)
    return Row(cell, distance, tolerance, distance.exceeds(tolerance))


_reference = cache(train)
_gradients = cache(gradients)
_spread = cache(kept_spread)
