"""Pipeline schedules to compare: DeepSpeed's 1F1B, which runs, and three that are only drawn.

A schedule is the order of each stage's tasks; `spans` computes when they run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from harness.layout.grid import Grid
from harness.layout.recompute import flops_again, runs_again
from harness.layout.shape import flops_per_unit
from harness.layout.stages import Work, layers_per_stage, schedule
from harness.plan.plan import Plan


class Task(NamedTuple):
    """A pass of one stage for one micro-batch. A backward pass may be split in two: first the
    gradients of its inputs, which the previous stage waits for, later those of its weights.
    """

    kind: Literal["forward", "backward", "inputs", "weights"]
    micro_batch: int
    chunk: int = 0
    """Index among the model chunks of the stage. Chunk 0 of all stages comes first in the model."""


@dataclass(frozen=True)
class Span:
    """One task of a stage with its times, counted from the start of the step."""

    stage: int
    kind: Literal["forward", "backward", "inputs", "weights"]
    micro_batch: int
    begin: float
    end: float
    chunk: int = 0


def stage_work(plan: Plan) -> list[tuple[int, int]]:
    """Return (forward, backward) work per stage: FLOPs per token, or layers if FLOPs are unknown.

    Backward takes twice the forward work plus the recomputation.
    """
    assert plan.stages is not None
    layers = layers_per_stage(plan.stages)
    units = [0, *[3] * sum(layers), 0]
    if plan.shape is not None:
        units = flops_per_unit(plan.shape, plan.seq_len)
    run = plan.config.model
    again = [0, *(runs_again(run.checkpointing, layer) for layer in range(sum(layers))), 0]
    if plan.shape is not None:
        again = flops_again(plan.shape, plan.seq_len, run.checkpointing, run.mlp_tiles)
    passes = []
    for stage in range(len(layers)):
        here = slice(plan.stages[stage], plan.stages[stage + 1])
        whole = sum(units[here])
        passes.append((whole // 3, whole - whole // 3 + sum(again[here])))
    return passes


def spans(
    rows: Sequence[Sequence[Task | Work]], work: Sequence[tuple[float, float]], chunks: int = 1
) -> list[Span]:
    """Return the tasks with their times. `work` gives the (forward, backward) time of each stage,
    summed over its chunks.

    A task begins when its stage is free and its input is available; sending takes no time.
    """
    done: dict[tuple[str, int, int], float] = {}  # (kind, position in the model, micro-batch)
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
    """Return the tasks that must finish first; the caller drops positions outside the model."""
    if task.kind == "forward":
        return [("forward", place - 1, task.micro_batch)]
    if task.kind == "weights":
        return [("backward", place, task.micro_batch)]
    return [("forward", place, task.micro_batch), ("backward", place + 1, task.micro_batch)]


def plan_spans(plan: Plan) -> list[Span]:
    """Return the spans of one step of a pipelined plan."""
    return spans(schedule(plan.grid.pipeline, plan.grad_accum), stage_work(plan))


def waiting(spans: Sequence[Span]) -> float:
    """Return the share of the step that a stage waits, averaged over stages."""
    length = max(span.end for span in spans)
    stages = 1 + max(span.stage for span in spans)
    return 1 - sum(span.end - span.begin for span in spans) / (length * stages)


Order = list[list[Task]]  # the tasks of each stage, in order


def one_f_one_b(stages: int, batches: int, _: int = 1) -> Order:
    """Return the order of DeepSpeed's schedule, 1F1B (arXiv 2006.09503)."""
    return [[Task(*work) for work in row if work is not None] for row in schedule(stages, batches)]


def gpipe(stages: int, batches: int, _: int = 1) -> Order:
    """Return the order of GPipe: all forward passes, then all backward passes, last micro-batch
    first (arXiv 1811.06965, figure 2c).
    """
    forward = [Task("forward", batch) for batch in range(batches)]
    return [[*forward, *(Task("backward", t.micro_batch) for t in forward[::-1])]] * stages


def interleaved(stages: int, batches: int, chunks: int = 2) -> Order:
    """Return the order of 1F1B with `chunks` model chunks per stage (arXiv 2104.04473, section
    2.2).

    Micro-batches pass a chunk in groups of `stages`.
    """
    if batches % stages:
        raise ValueError(
            f"{batches} micro-batches are not a multiple of {stages} stages, which interleaved "
            "stages "
            "need: move one of both sliders, or choose another schedule"
        )
    count = batches * chunks
    turns = [
        (number // stages % chunks, number // (stages * chunks) * stages + number % stages)
        for number in range(count)
    ]
    rows = []
    for stage in range(stages):
        forward = [Task("forward", batch, chunk) for chunk, batch in turns]
        backward = [Task("backward", batch, chunks - 1 - chunk) for chunk, batch in turns]
        first = min(count, 2 * (stages - 1 - stage) + (chunks - 1) * stages)
        rows.append([*forward[:first], *_alternate(forward[first:], backward)])
    return rows


def zero_bubble(stages: int, batches: int, _: int = 1) -> Order:
    """Return the order of ZB-H1: weight gradients are separate tasks, delayed by one micro-batch
    for each earlier stage, so that no stage keeps more activations than the first stage of 1F1B
    (arXiv 2401.10241, section 2.1).
    """
    rows = []
    for stage in range(stages):
        first = min(batches, stages - stage)
        row = [Task("forward", batch) for batch in range(first)]
        for batch in range(batches):
            row.append(Task("inputs", batch))
            if batch >= stage:
                row.append(Task("weights", batch - stage))
            if first + batch < batches:
                row.append(Task("forward", first + batch))
        late = range(max(0, batches - stage), batches)
        rows.append([*row, *(Task("weights", batch) for batch in late)])
    return rows


SCHEDULES: dict[str, Callable[[int, int, int], Order]] = {
    "1F1B": one_f_one_b,
    "GPipe": gpipe,
    "interleaved 1F1B": interleaved,
    "zero-bubble (ZB-H1)": zero_bubble,
}


def most_kept(row: Sequence[Task], chunks: int = 1) -> float:
    """Return the most micro-batches whose activations a stage keeps, chunks as fractions."""
    is_split = any(task.kind == "weights" for task in row)
    count, most = 0, 0
    for task in row:
        count += (task.kind == "forward") - (task.kind == ("weights" if is_split else "backward"))
        most = max(most, count)
    return most / chunks


def _alternate(forward: Sequence[Task], backward: Sequence[Task]) -> Iterator[Task]:
    for place, task in enumerate(backward):
        yield from forward[place : place + 1]
        yield task


@dataclass(frozen=True)
class Moment:
    """Work that all ranks do at the same time."""

    kind: Literal["passes", "sums", "sends", "gradients", "optimizer", "weights"]
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
