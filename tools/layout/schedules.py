"""Pipeline schedules to compare: DeepSpeed's 1F1B, which runs, and three that are only drawn.

Each is the order of a stage's tasks; tools/layout/timing.py finds when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from harness.layout.stages import schedule
from tools.layout.timing import Task

Order = list[list[Task]]
"""Of each stage, its tasks one after the other."""


def one_f_one_b(stages: int, batches: int, _: int = 1) -> Order:
    """Return DeepSpeed's schedule (arXiv 2006.09503)."""
    return [[Task(*work) for work in row if work is not None] for row in schedule(stages, batches)]


def gpipe(stages: int, batches: int, _: int = 1) -> Order:
    """Return all forward passes, then all backward passes, the last micro-batch first
    (arXiv 1811.06965, figure 2c).
    """
    forward = [Task("forward", batch) for batch in range(batches)]
    return [[*forward, *(Task("backward", t.micro_batch) for t in forward[::-1])]] * stages


def interleaved(stages: int, batches: int, chunks: int = 2) -> Order:
    """Return 1F1B over `chunks` parts of the model on each stage (arXiv 2104.04473, section 2.2).

    Micro-batches go through a chunk in groups of as many as there are stages.
    """
    if batches % stages:
        raise ValueError(
            f"{batches} micro-batches are no multiple of {stages} stages, which interleaved stages "
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
    """Return ZB-H1: gradients of weights are a task of their own, later by as many micro-batches
    as there are stages before this one, so that no stage keeps more than the first of 1F1B
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
    """Return the micro-batches whose activations a stage keeps at most; a chunk has its part."""
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
