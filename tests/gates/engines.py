"""Builds several engines in one process; a run has only one, after which nothing follows.

DeepSpeed keeps groups of ranks in globals of its module and uses them for the next engine
(docs/deepspeed_findings.md, 13 and 34).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch.distributed import distributed_c10d

from harness.data import batches
from harness.data.batch import Batch
from harness.engine import build
from harness.plan.plan import Plan
from harness.steps import dropout_seed
from tests.gates.cell import GLOBAL_BATCH
from tests.gates.recipe import SEED, global_batch, paired, rows, targets
from tests.gates.trajectory import Trajectory


def build_engine(plan: Plan, device: torch.device, **options: Any) -> Any:
    """Build an engine that leaves no state behind once it is closed."""
    groups_before = process_groups()
    engine: Any = build.build_engine(plan, device, **options)
    close = engine.close

    def close_and_forget() -> None:
        close()
        forget_nodes()
        if plan.stages is not None or plan.grid.tensor > 1 or plan.grid.expert > 1:
            forget_stages(groups_before)

    engine.close = close_and_forget
    return engine


def process_groups() -> set[Any]:
    """Return all groups of this process, except DeepSpeed's copy of the whole world."""
    return set(distributed_c10d._world.pg_map) - {groups._WORLD_GROUP}


def forget_stages(groups_before: set[Any]) -> None:
    """Allow a process to build more engines after one with divided stages, tensors or experts was
    destroyed.

    DeepSpeed keeps the rank grid in a global and uses it for the next engine. It also keeps the
    grid's groups, each with its threads (two hundred after ten engines on four ranks).
    """
    groups.mpu = None
    for group in process_groups() - groups_before:
        dist.destroy_process_group(group)


def forget_nodes() -> None:
    """Allow a process to build more engines after one with hpZ was destroyed.

    DeepSpeed keeps the group that shares the second copy of the weights in a global. The next
    engine with hpZ fails because of it, and one without hpZ uses it as its own.
    """
    group, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, None
    if group is not None:
        dist.destroy_process_group(group)


def take_steps(
    engine: Any, numbers: Iterable[int], rate: Callable[[int], float], trajectory: Trajectory
) -> None:
    """Train on the recipe's batches, distributed as in every run, and record the results.

    `rate` returns the learning rate of a step.
    """
    for number in numbers:
        batch = batch_of(engine, number)
        torch.manual_seed(dropout_seed(SEED, number, engine.plan.share.dropout_rank))
        done = engine.train_batch(share_of(engine.plan, batch), targets(batch), rate(number))
        trajectory.losses.append(float(engine.sum_over_ranks(done.loss_share)))
        trajectory.norms.append(float(done.grad_norm))
        trajectory.scales.append(engine.loss_scale)


def batch_of(engine: Any, number: int) -> Batch:
    """Return the recipe's global batch of a step as the engine's objective reads it."""
    batch = global_batch(number)
    return paired(batch) if engine.plan.config.train.preferences else batch


def share_of(plan: Plan, batch: Batch) -> list[Batch]:
    """Return this rank's micro-batches of a global batch."""
    data_rank, data_ranks = plan.grid.coords(plan.world.rank).data, plan.grid.data
    share = batches.share_of_rank(0, GLOBAL_BATCH, plan.micro_batch, data_rank, data_ranks)
    return [rows(batch, samples.tolist()) for samples in share]
