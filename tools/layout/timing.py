"""The work of each pipeline stage over time, if all that takes time is arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from harness.layout.recompute import flops_again, runs_again
from harness.layout.shape import flops_per_unit
from harness.layout.stages import Work, layers_per_stage, schedule
from harness.plan.plan import Plan


class Task(NamedTuple):
    """A pass of one stage for a micro-batch. A backward pass may be two: first the gradients of its
    inputs, which the stage before waits for, later those of its weights.
    """

    kind: Literal["forward", "backward", "inputs", "weights"]
    micro_batch: int
    chunk: int = 0
    """Of the parts of the model that the stage has: chunk 0 of all stages comes first."""


@dataclass(frozen=True)
class Span:
    """One stage at work on one micro-batch; times count from the begin of the step."""

    stage: int
    kind: Literal["forward", "backward", "inputs", "weights"]
    micro_batch: int
    begin: float
    end: float
    chunk: int = 0


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


def spans(
    rows: Sequence[Sequence[Task | Work]], work: Sequence[tuple[float, float]], chunks: int = 1
) -> list[Span]:
    """Tasks of each stage, in their order, with as much time as `work` says: (forward, backward),
    of all its chunks.

    A task begins when its stage is free and its input is there; sending takes no time.
    """
    done: dict[tuple[str, int, int], float] = {}  # (kind, place in the model, micro-batch)
    free = [0.0] * len(rows)
    queues = [[Task(*task) for task in row if task is not None] for row in rows]
    heads = [0] * len(rows)
    last, placed = chunks * len(rows) - 1, list[Span]()
    while any(head < len(queue) for head, queue in zip(heads, queues, strict=True)):
        before = len(placed)
        for stage, queue in enumerate(queues):
            for task in queue[heads[stage] :]:
                place = task.chunk * len(rows) + stage
                needs = [key for key in _needs(task, place) if 0 <= key[1] <= last]
                if not all(key in done for key in needs):
                    break
                begin = max(free[stage], *(done[key] for key in needs), 0.0)
                forward, backward = work[stage]
                share = {"forward": forward, "backward": backward}.get(task.kind, backward / 2)
                end = free[stage] = done[_key(task, place)] = begin + share / chunks
                placed.append(Span(stage, task.kind, task.micro_batch, begin, end, task.chunk))
                heads[stage] += 1
        assert len(placed) > before, "stages wait for each other"
    return placed


def _key(task: Task, place: int) -> tuple[str, int, int]:
    kind = "backward" if task.kind == "inputs" else task.kind
    return kind, place, task.micro_batch


def _needs(task: Task, place: int) -> list[tuple[str, int, int]]:
    """What must be done before; places that no model has are for the caller to drop."""
    if task.kind == "forward":
        return [("forward", place - 1, task.micro_batch)]
    if task.kind == "weights":
        return [("backward", place, task.micro_batch)]
    return [("forward", place, task.micro_batch), ("backward", place + 1, task.micro_batch)]


def plan_spans(plan: Plan) -> list[Span]:
    """One step of a pipelined plan."""
    return spans(schedule(plan.grid.pipeline, plan.grad_accum), stage_work(plan))


def waiting(spans: Sequence[Span]) -> float:
    """Share of the step that a stage waits, on average over stages."""
    length = max(span.end for span in spans)
    stages = 1 + max(span.stage for span in spans)
    return 1 - sum(span.end - span.begin for span in spans) / (length * stages)
