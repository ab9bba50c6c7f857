"""Builds several engines in one process; a run has only one, after which nothing follows.

DeepSpeed keeps groups of ranks in globals of its module and uses them for the next engine
(docs/deepspeed_findings.md, 13 and 34).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch.distributed import distributed_c10d

from harness.engine import build
from harness.plan.plan import Plan


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
