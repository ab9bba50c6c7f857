"""Finds ranks with a replica of a weight that silently differs from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicasDiffer(RuntimeError):
    """Replicas that should be equal differ: a crash; resume from an earlier checkpoint."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bit patterns as integers: exact in any order; () int64, no sync.

    One flipped bit always changes it; an exchange of two elements never does.
    """
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def outliers(
    replicated: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None
) -> dict[str, list[int]]:
    """Return the names of tensors that differ within `group`, with the ranks outside the majority.

    Without a majority (two ranks) these are all ranks. Collective: every rank of the group passes
    the same names in the same order.
    """
    sums = {name: checksum(tensor) for name, tensor in replicated}
    if not sums:
        return {}
    mine = torch.stack([*sums.values()])
    # The largest and, of the complements, the smallest: a table of all ranks only where they
    # differ.
    ends = torch.stack([mine, ~mine])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    differ = (ends[0] != ~ends[1]).nonzero()[:, 0]
    if not len(differ):
        return {}
    everyone = [torch.empty_like(mine[differ]) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine[differ], group=group)
    table = torch.stack(everyone, dim=1).tolist()  # (tensors, ranks)
    ranks, names = dist.get_process_group_ranks(group), [*sums]
    return {
        names[number]: _outside_majority(row, ranks)
        for number, row in zip(differ.tolist(), table, strict=True)
    }


def _outside_majority(values: list[int], ranks: list[int]) -> list[int]:
    (most_common, count), *_ = Counter(values).most_common(1)
    majority = most_common if count > len(values) / 2 else None
    return [rank for rank, value in zip(ranks, values, strict=True) if value != majority]
