"""Measured model states beside those predicted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.estimate.activations import saved_for_backward
from harness.estimate.rank_timeline import rank_timeline
from harness.layout.world import World
from harness.plan.memory import memory_inputs
from tests.gates.memory.cases import Case

POINTS = ("built", "gradients_ready", "between_steps")
SAVED = "saved"  # for the backward pass, where tokens are divided or computed again
# What the engine does at once -> the phases that it passes through.
PEAKS = {
    "accumulate": ("forward", "loss", "backward_first", "backward_last", "reduce"),
    "apply": ("norm", "cast", "step"),
}


@dataclass(frozen=True)
class Row:
    """One case, rank and point: bytes."""

    case: Case
    optimizer: str
    rank: int
    point: str
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        """Relative: above 0 when too much was predicted."""
        return self.predicted / self.measured - 1


def predicted_bytes(case: Case, rank: int, model: Path) -> dict[str, int]:
    """Return a rank's estimated bytes at each point, and its peaks; on a CPU, device and host are
    one memory.
    """
    from tests.gates.memory.worker import plan_of

    world = World(rank, case.ranks, rank, case.ranks, launcher="torch")
    inputs = memory_inputs(plan_of(case, world, model))
    assert inputs is not None, "the model's family is known"
    timeline = rank_timeline(inputs, rank)

    def bytes_in(phase: str) -> int:
        return sum(
            size
            for place in ("device", "host")
            for component, size in timeline.phase(phase, place).items()
            if component != "process"
        )

    points = {point: bytes_in(point) for point in POINTS}
    points[SAVED] = saved_for_backward(inputs.of_stage(0))
    return points | {name: max(map(bytes_in, phases)) for name, phases in PEAKS.items()}


def compare(case: Case, folder: Path) -> list[Row]:
    """The rows of a case that was measured into `folder`."""
    rows = []
    for rank in range(case.ranks):
        results = json.loads((folder / f"{case.name}.rank{rank}.json").read_text())
        predicted = predicted_bytes(case, rank, folder / case.model)
        for point in (*POINTS, *PEAKS, SAVED):
            exact = results["points"].get(point)
            if point == SAVED and exact is None:
                continue
            measured = exact["bytes"] if exact else results["peaks"][point]
            rows.append(Row(case, results["optimizer"], rank, point, measured, predicted[point]))
    return rows


def markdown(rows: Iterable[Row], heading: str, points: Iterable[str]) -> str:
    """A table with a line per case that has these points, of its worse rank."""
    points = tuple(points)
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        if row.point in points:
            by_case.setdefault(row.case.name, []).append(row)
    names = [f"{point.replace('_', ' ')}: measured, predicted, error" for point in points]
    columns = ["layout", "precision", "accumulated", "optimizer", "its class", *names]
    lines = [heading, "", _line(columns), "|" + "---|" * len(columns)]
    for same_case in by_case.values():
        case = same_case[0].case
        cells = [case.layout, case.precision, str(case.accumulation), case.optimizer]
        cells.append(same_case[0].optimizer)
        for point in points:
            worst = max((r for r in same_case if r.point == point), key=lambda row: abs(row.error))
            cells.append(f"{worst.measured:,} {worst.predicted:,} {worst.error:+.3%}")
        lines.append(_line(cells))
    return "\n".join([*lines, ""])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
