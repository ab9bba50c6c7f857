"""Division of ranks over axes and nodes, and of samples over data ranks."""

from __future__ import annotations

from math import prod

from harness.config.batch import BatchSizes
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
    """Divide the ranks over the axes. If they do not divide, continue with the number of ranks that
    one model replica needs, so that later passes can report other problems.
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
    """Return the ranks that some axes leave for the others; all ranks if they do not divide."""
    left, rest = divmod(world.world_size, prod(getattr(grid, axis) for axis in axes))
    return world.world_size if rest else left


def check_secondary(draft: Draft) -> None:
    """Require that the ranks can share a second copy of the weights (ZeRO++'s hpZ)."""
    ranks = draft.world.world_size
    size = min(draft.ds.value(_SECONDARY), ranks)
    if size < 1 or ranks % size:
        draft.problems.add(
            _SECONDARY,
            f"which does not divide {ranks} ranks",
            f'use "auto" for the {draft.world.local_world_size} ranks of a node',
        )


def divide_batch(draft: Draft) -> None:
    """Split a step's samples into micro-batches for the data ranks."""
    # A value of the wrong type is already reported; its default is not the user's choice.
    if draft.ds.rejected.intersection(_BATCH_KEYS):
        return
    train = draft.config.train
    accum = draft.ds.literal("gradient_accumulation_steps")
    try:
        draft.batch = BatchSizes.divided(
            train.global_batch, draft.grid.data, train.micro_batch, accum, draft.curriculum.quantum
        )
    except ValueError as error:
        origins = draft.asked(key for key in _DIVIDED if key in str(error))
        draft.problems.say(f"{error} ({origins})")


def note_nodes(draft: Draft) -> None:
    """Note each axis whose neighbours are not all on one node, and ZeRO 3 on a single GPU."""
    grid, local = draft.grid, draft.world.local_world_size
    alone = grid.world_size == 1 and draft.world.accelerator == "cuda"
    offload = draft.ds.value("zero_optimization.offload_param.device")
    if alone and offload in (None, "none") and draft.ds.value("zero_optimization.stage") == 3:
        draft.note(
            "alone",
            "ZeRO 3 saves no memory on one GPU, and steps took a quarter longer than with "
            "ZeRO 1: set ds.zero_optimization.stage=1",
        )
    if local >= grid.world_size:
        return
    # Ranks per group, and the stride between consecutive ranks of a group.
    groups = {
        "tensor_parallel.autotp_size": (grid.tensor, 1),
        "sequence_parallel_size": (grid.sequence, grid.tensor),
        "expert_parallel.autoep_size": (grid.expert, grid.tensor),
    }
    for key, (size, apart) in groups.items():
        if size > 1 and local % (size * apart):
            within = [n for n in range(1, size) if not (size % n or local % (n * apart))]
            fewer = f"; {within[-1]} would be" if within else ""
            draft.note(
                "across_nodes",
                f"{key} is {size}: {size * apart} neighbouring ranks exchange data in every layer, "
                f"and are not all within one node of {local}{fewer}",
            )
