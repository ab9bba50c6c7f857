"""Finds ranks whose replica of a weight silently differs from the others."""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicasDiffer(RuntimeError):
    """Replicas that should be equal differ. Ends the run; resume from an earlier checkpoint."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bit patterns, () int64, exact in any order, without waiting for
    the device. A single flipped bit always changes it; swapping two elements never does.
    """
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def checksums(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> list[dict[int, int]]:
    """Return the checksums of each tensor by rank of `group`. Collective: all its ranks pass the
    corresponding tensors in the same order. `device`: the one on which the ranks communicate.
    """
    sums = [checksum(tensor).to(device) for tensor in tensors]
    if not sums:
        return []
    mine = torch.stack(sums)
    # Maximum and, through the complements, minimum: all ranks' values are gathered only where these
    # differ.
    ends = torch.stack([mine, ~mine])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    differ = (ends[0] != ~ends[1]).nonzero()[:, 0]
    ranks = dist.get_process_group_ranks(group)
    table = [dict.fromkeys(ranks, value) for value in mine.tolist()]
    if len(differ):
        everyone = [torch.empty_like(mine[differ]) for _ in ranks]
        dist.all_gather(everyone, mine[differ], group=group)
        for number, *values in torch.stack([differ, *everyone], dim=1).tolist():
            table[number] = dict(zip(ranks, values, strict=True))
    return table


def outside_majority(sums: Mapping[int, int]) -> list[int]:
    """Return the ranks whose checksum is not that of the majority; all ranks if there is none."""
    (most_common, count), *_ = Counter(sums.values()).most_common(1)
    majority = most_common if count > len(sums) / 2 else None
    return [rank for rank, value in sums.items() if value != majority]


def largest_difference(
    tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Return the largest difference of a tensor over the ranks of `group`, relative to its largest
    element; NaN if an element is not finite. Collective. `device`: the one on which the ranks
    communicate.
    """
    own = tensor.detach().to(device, torch.float32)
    own = torch.nan_to_num(own, nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    ends = torch.stack([own, -own])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = ends[0], -ends[1]
    size = torch.maximum(largest.abs(), smallest.abs()).max().clamp_min(1e-30)
    return float((largest - smallest).max() / size)
