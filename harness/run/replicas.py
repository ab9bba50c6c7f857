"""Compares the replicas of the weights on the data ranks of a run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness.guard.replicas import ReplicasDiffer, outliers
from harness.layout.share import Purpose
from harness.run.run import Run, is_due
from harness.run.saving import finish_save

_HOLDERS: tuple[Purpose, ...] = ("replicas", "expert_replicas")


def check_replicas(run: Run, saves: bool) -> None:
    """Compare the replicas if a check is due, and before every save. Collective.

    Raises ReplicasDiffer with the ranks and the weights.
    """
    every, copies = run.plan.config.guard.replicas_every, len(run.plan.share.ranks("replicas"))
    if not every or copies == 1 or not (saves or is_due(run.state.step, every)):
        return
    weights, differing = 0, dict[str, list[int]]()
    for purpose in _HOLDERS:
        named = list(run.engine.replicated(purpose))
        weights += len(named)
        differing |= outliers(named, run.engine.group_of(purpose)) if named else {}
    differ = torch.tensor(len(differing), device=run.engine.device)
    dist.all_reduce(differ, op=dist.ReduceOp.MAX)
    if not differ:
        run.event("replicas_equal", step=run.state.step, tensors=weights)
        return
    of_all_ranks: list[Any] = [None] * run.plan.world.world_size
    dist.all_gather_object(of_all_ranks, differing)
    different = {name: ranks for of_rank in of_all_ranks for name, ranks in of_rank.items()}
    run.event("replicas_differ", step=run.state.step, ranks_by_parameter=different)
    finish_save(run)  # they were equal when it began
    newest, (name, ranks) = run.saver.store.all()[-1:], next(iter(different.items()))
    owners = f"rank {', '.join(f'{rank}{run.plan.grid.described(rank)}' for rank in ranks)}"
    if set(ranks) in [{*group} for purpose in _HOLDERS for group in run.plan.share.every(purpose)]:
        owners += " (among which there is no majority)"
    advice = "No checkpoint predates it: begin the run again"
    if newest:
        advice = f"{newest[0].name} predates it: start again from there"
    raise ReplicasDiffer(
        f"after step {run.state.step} data ranks differ in {len(different)} weights that should be "
        f"the same, {name} on {owners}: faulty memory or links there. {advice}"
    )
