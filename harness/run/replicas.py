"""Compares the weights that several ranks of a run hold alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from harness.checkpoint.meeting import gathered, told
from harness.engine.api import Replica
from harness.guard.replicas import ReplicasDiffer, checksums, largest_difference, outside_majority
from harness.layout.grid import Grid
from harness.run.run import Run, is_due
from harness.run.saving import finish_save

# Largest relative difference of an undivided weight over tensor-parallel ranks on GPUs: each
# computes its gradient itself, and may sum in another order. On CPUs there is none.
ROUNDING = 1e-2


def check_replicas(run: Run, saves: bool) -> None:
    """Compare the replicas if a check is due, and before every save. Collective.

    Raises ReplicasDiffer with the ranks and the weights.
    """
    every = run.plan.config.guard.replicas_every
    if not every or run.plan.world.world_size == 1 or not (saves or is_due(run.state.step, every)):
        return
    result = told(_together(gathered(_compared(run))))
    if result.drifted:
        run.event("replicas_drift", step=run.state.step, apart_by_parameter=result.drifted)
    different = result.differing
    if not different:
        if result.weights:
            run.event("replicas_equal", step=run.state.step, tensors=result.weights)
        return
    run.event("replicas_differ", step=run.state.step, ranks_by_parameter=different)
    finish_save(run)  # they were equal when it began
    newest, (name, ranks) = run.saver.store.all()[-1:], next(iter(different.items()))
    owners = f"rank {', '.join(f'{rank}{run.plan.grid.described(rank)}' for rank in ranks)}"
    if name in result.undecided:
        owners += " (among which there is no majority)"
    advice = "No checkpoint predates it: begin the run again"
    if newest:
        advice = f"{newest[0].name} predates it: start again from there"
    raise ReplicasDiffer(
        f"after step {run.state.step} ranks differ in {len(different)} weights that should be the "
        f"same, {name} on {owners}: faulty memory or links there. {advice}"
    )


@dataclass
class _Compared:
    """Differences that one rank, or all of them together, have found."""

    weights: int = 0
    differing: dict[str, list[int]] = field(default_factory=dict)
    """The ranks that hold another than most, by the weight's name."""
    undecided: set[str] = field(default_factory=set)
    """Names of those without a majority."""
    drifted: dict[str, float] = field(default_factory=dict)
    """Relative differences that are rounding."""


def _together(results: Iterable[_Compared]) -> _Compared:
    whole = _Compared()
    for result in results:
        whole.weights = max(whole.weights, result.weights)
        whole.undecided |= result.undecided
        whole.drifted |= result.drifted
        for name, ranks in result.differing.items():
            whole.differing[name] = sorted({*ranks, *whole.differing.get(name, ())})
    return whole


def _compared(run: Run) -> _Compared:
    """Compare what this rank holds alike with others. Collective."""
    engine = run.engine
    replicas = list(engine.replicated())
    sums = checksums((r.tensor for r in replicas), engine.group_of("stage"), engine.device)
    of_holders = [
        (replica, {rank: of_rank[rank] for rank in replica.ranks})
        for replica, of_rank in zip(replicas, sums, strict=True)
    ]
    for name, weight, group in engine.tied():
        (of_rank,) = checksums([weight], group, engine.device)
        of_holders.append((Replica(name, weight, tuple(of_rank), False), of_rank))
    result = _Compared(len(of_holders))
    for replica, of_rank in of_holders:
        if len({*of_rank.values()}) == 1:
            continue
        if _may_drift(run.plan.grid, engine.device.type, replica, of_rank):
            apart = largest_difference(replica.tensor, engine.group_of("tensor"), engine.device)
            if apart <= ROUNDING:
                result.drifted[replica.name] = apart
                continue
        ranks = outside_majority(of_rank)
        result.differing[replica.name] = ranks
        if len(ranks) == len(of_rank):
            result.undecided.add(replica.name)
    return result


def _may_drift(grid: Grid, device: str, replica: Replica, of_rank: Mapping[int, int]) -> bool:
    """Return whether an undivided weight differs between tensor-parallel ranks alone, on a device
    that rounds differently from time to time. The same on all ranks that hold it.
    """
    if device == "cpu" or grid.tensor == 1 or not replica.is_whole:
        return False
    values = {(grid.coords(rank).tensor, value) for rank, value in of_rank.items()}
    return len(values) == len({tensor for tensor, _ in values})
