"""Compares a trained cell with the plain loop."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from tests.gates.cell import GLOBAL_BATCH, Cell
from tests.gates.models import DROPPING, LEARNED
from tests.gates.plain_model import Split, Way
from tests.gates.reference import GATE, ORDERS, Sum, gradients, spreads, trained
from tests.gates.trajectory import Difference, Trajectory, difference, worst_relative

LEAST_FALL = 0.1  # relative fall of the loss in the gate; without learning, it proves little


@dataclass(frozen=True)
class Row:
    """The verdict on one cell."""

    cell: Cell
    distance: Difference
    tolerance: Difference
    failures: list[str] = field(default_factory=list)
    """The quantities whose distance exceeds the tolerance."""

    def line(self) -> str:
        """Return a line: the verdict, each quantity as measured / allowed, ! for excess."""
        allowed = vars(self.tolerance)
        pairs = [
            f"{name} {x:.1e}/{allowed[name]:.1e}" + "!" * (name in self.failures)
            for name, x in vars(self.distance).items()
        ]
        verdict = "DIFFERS" if self.failures else "equal"
        return f"{self.cell.name:38} {verdict}  " + "  ".join(pairs)


def compare(cell: Cell, out: Path, factor: float, whole: bool = False, device: str = "cpu") -> Row:
    """Return the distance of `cell`, trained into `out`, from the plain loop, and its tolerance.

    `whole`: use the spread of all orders, even if fewer orders already allow the distance.
    `device`: device of the training and of the plain loop.
    """
    mixture = "num_experts_per_tok" in LEARNED[cell.architecture]
    # A balancing loss is not linear in the micro-batch, and dropout depends on its shape, so the
    # plain loop uses the cell's own micro-batch.
    own = mixture or cell.architecture == DROPPING
    split = Split.even(cell.micro_batch if own else GLOBAL_BATCH)
    how = cell.how
    way = Way(
        *(cell.architecture, cell.precision, how.has_bf16_states, how.compiled, how.tensor),
        tiles=how.model.get("mlp_tiles", 1),
        device=device,
        reversible=how.model.get("reversible", False),
        varlen=how.varlen and cell.precision != "fp32",
        kind=how.kind,
        objective=how.objective,
    )
    trajectory = Trajectory.load(out / cell.name)
    # A token between two experts goes to one or the other, depending on the order and the rounding
    # of a sum, and the loss of its step jumps: that of the plain loop does in several ways.
    jumps = mixture and cell.precision != "fp32"
    blocks = how.tensor if how.tensor > 2 else 1  # two parts have the same sum in either order
    for number in range(2 * ORDERS if jumps else 1):
        turned = replace(
            way, sums=("fp32", cell.sums)[number % 2], first_block=number // 2 % blocks
        )
        order = split.reordered(number // 2 // blocks)
        reference = trained(turned, order, mixture, GATE)
        row = _against(reference, trajectory, cell, way, factor, whole)
        if not row.failures or not {"loss", "norm", "held_out"}.issuperset(row.failures):
            break
    return row


def _against(
    reference: Trajectory, trajectory: Trajectory, cell: Cell, way: Way, factor: float, whole: bool
) -> Row:
    """Return the verdict by one plain loop; its spread is that of `way`."""
    fall = 1 - min(reference.losses) / reference.losses[0]
    assert fall >= LEAST_FALL, f"the reference's loss falls by {fall:.0%} only"
    how = cell.how
    if cell.architecture == DROPPING:  # another order would drop other states
        way = replace(way, architecture="gpt2")
    allowed: Iterable[Difference] = spreads(way)
    distance = difference(trajectory, reference)
    # Sums of bf16 states depend on their order. Tensor and sequence parallelism add the gradients
    # of each part, expert parallelism adds those of several ranks' tokens, and a chunked loss adds
    # each chunk's gradient of the hidden states.
    divided = how.tensor * how.sequence * how.expert > 1
    if not (how.has_bf16_states or divided or how.loss_chunk):
        by = Sum(
            cell.sums,
            cell.micro_batch,
            cell.data_ranks,
            how.stage >= 2,
            how.pipeline,
            how.stage == 3,
        )
        same, order = _gradients(way, by)
        distance = replace(distance, gradient=worst_relative(trajectory.gradients, same))
        least = max(order, torch.finfo(torch.float32).eps)
        allowed = (replace(spread, gradient=least) for spread in allowed)
    return judge(cell, distance, (spread.scaled(factor) for spread in allowed), whole)


def judge(cell: Cell, distance: Difference, tolerances: Iterable[Difference], whole: bool) -> Row:
    """Return the verdict by the first tolerance that allows the distance, or by the last one.

    No tolerance is smaller than the previous one, so the verdict equals that of the last. `whole`
    uses only the last one, as a table shows it.
    """
    for tolerance in tolerances:
        row = Row(cell, distance, tolerance, distance.exceeds(tolerance))
        if not (row.failures or whole):
            break
    return row


_gradients = cache(gradients)
