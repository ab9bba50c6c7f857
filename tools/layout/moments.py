"""One step of a job with pipeline, data and tensor ranks, as a sequence of moments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from harness.layout.grid import Grid
from harness.layout.stages import Work, schedule

Kind = Literal["passes", "sums", "sends", "gradients", "optimizer", "weights"]


@dataclass(frozen=True)
class Moment:
    """Work that all ranks do at the same time."""

    kind: Kind
    work: tuple[Work, ...]  # per stage: the pass that it computes or has just computed
    tick: int = 0  # tick of the schedule, from 0; after the passes, the last one
    sends: tuple[tuple[int, int], ...] = ()  # (sending stage, receiving stage)


def moments(grid: Grid, micro_batches: int, zero_stage: int) -> Iterator[Moment]:
    """Yield the moments of a pipelined step: for each tick its passes, the sums over tensor ranks
    in its layers and its sends; then the gradient reduction over data ranks, the optimizer, and the
    gathering of weights with ZeRO 1.
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
    """Yield (sender, receiver): hidden states go to the next stage, their gradients back."""
    for stage, task in enumerate(work):
        if task is not None:
            to = stage + (1 if task[0] == "forward" else -1)
            if 0 <= to < len(work):
                yield stage, to
