"""Axes that cannot be combined: the reasons, and the nearest layout that works."""

from collections.abc import Iterator
from dataclasses import replace

from harness.layout.expert import ExpertPlan
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from harness.layout.tensor import tensor_problems


def sequence_problems(
    shape: Shape,
    places: int,
    seq_len: int,
    tensor: int = 1,
    ranks: int | None = None,
    unit: str = "tokens",
) -> list[str]:
    """Return why `places` ranks cannot split rows of `seq_len` tokens, with the numbers that can.

    `shape`: the full model's; `tensor`: tensor-parallel size; `ranks`: the ranks left by the other
    axes, which the suggested numbers must divide (None: `places`); `unit`: of `seq_len`.
    """
    ranks = ranks or places
    problems = [*_problems(shape, places, seq_len, tensor)]
    if not problems:
        return []
    most = max(places, shape.num_heads)
    legal = [
        n for n in range(1, most + 1) if not (ranks % n or [*_problems(shape, n, seq_len, tensor)])
    ]
    use = " or ".join(map(str, legal))
    below = seq_len // places * places
    if below and not [*_problems(shape, places, below, tensor)]:  # only seq_len is wrong
        use += f", or {below} or {below + places} {unit}"
    return [f"{' and '.join(problems)}: use {use}"]


def _problems(shape: Shape, places: int, seq_len: int, tensor: int) -> Iterator[str]:
    if places == 1:
        return
    if not shape.family.divides_rows:
        yield f"sequence parallelism does not support {shape.model_type}"
    if seq_len % places:
        yield f"{seq_len} tokens cannot be divided over {places} ranks"
    heads, kv = shape.num_heads // tensor, max(1, shape.num_kv_heads // tensor)
    each = f" on each of {tensor} tensor-parallel ranks" if tensor > 1 else ""
    if heads % places:
        yield f"{heads} attention heads{each} cannot be divided over {places}"
    if kv % places and places % kv:
        yield f"{kv} key heads{each} cannot be divided over {places}, nor be shared"


KEYS = {
    "pipeline": "pipeline.stages",
    "tensor": "tensor_parallel.autotp_size",
    "sequence": "sequence_parallel_size",
    "expert": "expert_parallel.autoep_size",
}
"""JSON key of each axis's size."""
_NOT_IN_STAGES = {
    "sequence": "stages pass on only hidden states, but sequence parallelism needs the masks of "
    "whole rows in every stage",
    "expert": "ZeRO sums the norm over all stages group by group, and would wait forever for a "
    "stage without experts",
}


def incompatible_axes(shape: Shape | None, grid: Grid, seq_len: int) -> list[tuple[str, str, str]]:
    """Return (key, reason, replacement) of each axis that does not combine with pipeline stages.

    `seq_len`: of the shortest rows.
    """
    if grid.pipeline == 1:
        return []
    return [
        (
            KEYS[axis],
            f"cannot be combined with pipeline.stages={grid.pipeline}: {why}",
            f"use {_nearest(shape, grid, seq_len, getattr(grid, axis))}",
        )
        for axis, why in _NOT_IN_STAGES.items()
        if getattr(grid, axis) > 1
    ]


def _nearest(shape: Shape | None, grid: Grid, seq_len: int, size: int) -> str:
    """Return the keys of the nearest layout on the same ranks. `size`: of the axis to replace."""
    for nearest in _candidates(grid, size):
        if _can_be_run(shape, nearest, seq_len):
            sizes = {key: getattr(nearest, axis) for axis, key in KEYS.items()}
            used = " and ".join(f"{key}={n}" for key, n in sizes.items() if n > 1)
            left = (
                key
                for axis, key in KEYS.items()
                if getattr(nearest, axis) == 1 < getattr(grid, axis)
            )
            return f"{used} without {' and '.join(left)}"
    return "one of them"


def _candidates(grid: Grid, size: int) -> Iterator[Grid]:
    """Yield layouts, nearest first: tensor parallelism instead of an axis, then data."""
    for sizes in (
        {"pipeline": 1, "tensor": grid.tensor * grid.pipeline},
        {"sequence": 1, "expert": 1, "tensor": grid.tensor * size},
        {"pipeline": 1},
        {"sequence": 1, "expert": 1},
    ):
        try:
            yield replace(grid, **sizes)
        except ValueError:  # too few ranks remain for the experts
            continue


def _can_be_run(shape: Shape | None, grid: Grid, seq_len: int) -> bool:
    if shape is None:
        return grid.tensor == 1
    if tensor_problems(shape, grid.tensor):
        return False
    if sequence_problems(shape, grid.sequence, seq_len, grid.tensor):
        return False
    if grid.expert == 1:
        return True
    try:
        plan = ExpertPlan.make(shape.model_type, shape.num_experts)
    except ValueError:
        return False
    return not plan.problem(grid.expert, grid.data * grid.sequence)
