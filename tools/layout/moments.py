"""One step of a job with pipeline, data and tensor ranks, moment by moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from harness.layout.grid import Grid
from harness.layout.stages import Work, schedule

Kind = Literal["passes", "sums", "sends", "gradients", "optimizer", "weights"]


@dataclass(frozen=True)
class Moment:
    """Work of all ranks at the same time."""

    kind: Kind
    work: tuple[Work, ...]  # of each stage: the pass that it computes, or that it has just computed
    tick: int = 0  # of the schedule, from 0; its last one after the passes
    sends: tuple[tuple[int, int], ...] = ()  # (stage, stage that it sends to)


def moments(grid: Grid, micro_batches: int, zero_stage: int) -> Iterator[Moment]:
    """Yield the moments of a step of a pipeline: the ticks of its schedule, each with the sums over
    tensor ranks in its layers and what it hands on; then gradients over data ranks, the optimizer,
    and the weights that ZeRO 1 gathers behind it.
    """
    rows = schedule(grid.pipeline, micro_batches)
    tick, idle = 0, (None,) * grid.pipeline
    for tick, work in enumerate(zip(*rows, strict=True)):
        yield Moment("passes", work, tick)
        if grid.tensor > 1:
            yield Moment("sums", work, tick)
        if sends := tuple(_sends(work)):
            yield Moment("sends", work, tick, sends)
    if grid.data > 1:
        yield Moment("gradients", idle, tick)
    yield Moment("optimizer", idle, tick)
    if grid.data > 1 and zero_stage:
        yield Moment("weights", idle, tick)


def _sends(work: tuple[Work, ...]) -> Iterator[tuple[int, int]]:
    """Hidden states go to the next stage, their gradients to the one before."""
    for stage, task in enumerate(work):
        if task is not None:
            to = stage + (1 if task[0] == "forward" else -1)
            if 0 <= to < len(work):
                yield stage, to
