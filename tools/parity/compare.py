"""A trained cell against the plain loop."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tools.parity.cells import ARCHITECTURES, GLOBAL_BATCH, Cell
from tools.parity.measure import Trajectory, difference
from tools.parity.reference import Split, Way, spread, train
from tools.parity.report import Row

LEAST_FALL = 0.2  # of the loss over the gate's steps: a model that does not learn proves little


def compare(cell: Cell, out: Path, factor: float) -> Row:
    """How far `cell`, trained into `out`, is from the plain loop, and how far it may be."""
    if cell.refused is not None:
        return Row(cell, refused=cell.refused)
    mixture = "num_experts_per_tok" in ARCHITECTURES[cell.architecture]
    # A balancing loss is not linear in the micro-batch, which is therefore the cell's own.
    split = Split.even(cell.micro_batch if mixture else GLOBAL_BATCH)
    way = Way(cell.architecture, cell.precision, cell.has_bf16_states, cell.compiled)
    reference = _reference(way, split)
    fall = 1 - min(reference.losses) / reference.losses[0]
    assert fall >= LEAST_FALL, f"the reference's loss falls by {fall:.0%} only"
    found = difference(Trajectory.load(out / cell.name), reference)
    tolerance = _spread(way).scaled(factor)
    return Row(cell, found=found, tolerance=tolerance, failures=found.exceeds(tolerance))


_reference = cache(train)
_spread = cache(spread)
