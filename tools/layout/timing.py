"""When each pipeline stage works on what, if all that takes time is arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.layout.shape import flops_per_unit
from harness.layout.stages import Work, layers_per_stage, schedule
from harness.plan.plan import Plan


@dataclass(frozen=True)
class Span:
    """One stage at work on one micro-batch; times count from the begin of the step."""

    stage: int
    kind: Literal["forward", "backward"]
    micro_batch: int
    begin: float
    end: float


def stage_work(plan: Plan) -> list[tuple[int, int]]:
    """Per stage, FLOPs of (forward, backward) pass per token; layers, where these are not known.

    Backward is twice forward, and once more for the layers that are recomputed.
    """
    assert plan.stages is not None
    layers = layers_per_stage(plan.stages)
    units = [0, *[3] * sum(layers), 0]
    if plan.shape is not None:
        units = flops_per_unit(plan.shape, plan.config.data.seq_len)
    again = plan.config.model.checkpointing == "full"
    found, first = [], 1
    for stage, count in enumerate(layers):
        whole = sum(units[plan.stages[stage] : plan.stages[stage + 1]])
        recomputed = sum(units[first : first + count]) // 3 if again else 0
        found.append((whole // 3, whole - whole // 3 + recomputed))
        first += count
    return found


def spans(rows: Sequence[Sequence[Work]], work: Sequence[tuple[float, float]]) -> list[Span]:
    """The schedule's rows with as much time for each pass as `work` says: (forward, backward).

    A pass begins when its stage is free and its input is there; sending takes no time.
    """
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(rows)
    found = []
    for column in zip(*rows, strict=True):  # what a tick needs, an earlier one has made
        for stage, task in enumerate(column):
            if task is None:
                continue
            kind, batch = task
            source = stage - 1 if kind == "forward" else stage + 1
            begin = max(free[stage], done.get((kind, source, batch), 0.0))
            end = begin + work[stage][kind == "backward"]
            free[stage] = done[kind, stage, batch] = end
            found.append(Span(stage, kind, batch, begin, end))
    return found


def plan_spans(plan: Plan) -> list[Span]:
    """One step of a pipelined plan."""
    return spans(schedule(plan.grid.pipeline, plan.grad_accum), stage_work(plan))


def waiting(found: Sequence[Span]) -> float:
    """Share of the step that a stage waits, on average over stages."""
    length = max(span.end for span in found)
    stages = 1 + max(span.stage for span in found)
    return 1 - sum(span.end - span.begin for span in found) / (length * stages)
