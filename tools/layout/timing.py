"""The work of each pipeline stage over time, if all that takes time is arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.layout.recompute import flops_again, runs_again
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

    Backward is twice forward, and what is computed again.
    """
    assert plan.stages is not None
    layers = layers_per_stage(plan.stages)
    units = [0, *[3] * sum(layers), 0]
    if plan.shape is not None:
        units = flops_per_unit(plan.shape, plan.config.data.seq_len)
    run = plan.config.model
    again = [0, *(runs_again(run.checkpointing, layer) for layer in range(sum(layers))), 0]
    if plan.shape is not None:
        again = flops_again(plan.shape, plan.config.data.seq_len, run.checkpointing, run.mlp_tiles)
    passes = []
    for stage in range(len(layers)):
        here = slice(plan.stages[stage], plan.stages[stage + 1])
        whole = sum(units[here])
        passes.append((whole // 3, whole - whole // 3 + sum(again[here])))
    return passes


def spans(rows: Sequence[Sequence[Work]], work: Sequence[tuple[float, float]]) -> list[Span]:
    """The schedule's rows with as much time for each pass as `work` says: (forward, backward).

    A pass begins when its stage is free and its input is there; sending takes no time.
    """
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(rows)
    placed = []
    for column in zip(*rows, strict=True):  # what a tick needs, an earlier one has made
        for stage, task in enumerate(column):
            if task is None:
                continue
            kind, batch = task
            source = stage - 1 if kind == "forward" else stage + 1
            begin = max(free[stage], done.get((kind, source, batch), 0.0))
            end = begin + work[stage][kind == "backward"]
            free[stage] = done[kind, stage, batch] = end
            placed.append(Span(stage, kind, batch, begin, end))
    return placed


def plan_spans(plan: Plan) -> list[Span]:
    """One step of a pipelined plan."""
    return spans(schedule(plan.grid.pipeline, plan.grad_accum), stage_work(plan))


def waiting(spans: Sequence[Span]) -> float:
    """Share of the step that a stage waits, on average over stages."""
    length = max(span.end for span in spans)
    stages = 1 + max(span.stage for span in spans)
    return 1 - sum(span.end - span.begin for span in spans) / (length * stages)
