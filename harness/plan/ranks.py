"""Division of ranks over the axes, and of samples over data ranks."""

from __future__ import annotations

from math import prod

from harness.config.batch import Batch
from harness.layout.grid import Axis, Grid
from harness.layout.world import World
from harness.plan.draft import Draft
from harness.plan.pipeline import num_stages

_TENSOR, _SEQUENCE, _STAGES = (
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    "pipeline.stages",
)
_SECONDARY = "zero_optimization.zero_hpz_partition_size"
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_DIVIDED = ("train.global_batch", "train.micro_batch", "ramp.batch_from", "ramp.batch_step")


def divide_ranks(draft: Draft) -> None:
    """Split the ranks over the axes. If they do not divide, the plan goes on with as many as one
    model needs, for later passes to report what else is wrong with these sizes.
    """
    ds, world = draft.ds, draft.world
    sizes = {key: max(1, ds.value(key)) for key in (_TENSOR, _SEQUENCE)}  # 0 means off
    sizes[_STAGES] = num_stages(ds.tree)
    axes = sizes[_STAGES], sizes[_TENSOR], sizes[_SEQUENCE]
    try:
        draft.grid = Grid(world.world_size, *axes)
    except ValueError as error:
        origins = draft.asked(key for key, size in sizes.items() if size > 1)
        draft.problems.say(f"{error} ({origins})")
        draft.grid = Grid(prod(axes), *axes)


def left_of(world: World, grid: Grid, *axes: Axis) -> int:
    """Return the ranks that some axes leave to the others; all, if they do not divide them."""
    left, rest = divmod(world.world_size, prod(getattr(grid, axis) for axis in axes))
    return world.world_size if rest else left


def check_secondary(draft: Draft) -> None:
    """Require that the ranks can share a second copy of the weights (ZeRO++'s hpZ)."""
    ranks = draft.world.world_size
    size = min(draft.ds.value(_SECONDARY), ranks)
    if size < 1 or ranks % size:
        draft.problems.add(
            _SECONDARY,
            f"over which {ranks} ranks do not divide",
            f'use "auto" for the {draft.world.local_world_size} ranks of a node',
        )


def divide_batch(draft: Draft) -> None:
    """Split a step's samples into micro-batches of data ranks."""
    # A value of the wrong type is already reported; nobody chose the default in its place.
    if draft.ds.rejected.intersection(_BATCH_KEYS):
        return
    train = draft.config.train
    accum = draft.ds.literal("gradient_accumulation_steps")
    try:
        draft.batch = Batch.divided(
            train.global_batch, draft.grid.data, train.micro_batch, accum, draft.curriculum.quantum
        )
    except ValueError as error:
        origins = draft.asked(key for key in _DIVIDED if key in str(error))
        draft.problems.say(f"{error} ({origins})")
