"""The process groups in which a rank sums, counts and compares, by purpose."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from harness.layout.share import Purpose, Share
from harness.models.initialize import Send


class Groups:
    """Those of `share`, found among the groups that are `made`: DeepSpeed's, and all ranks'."""

    def __init__(self, share: Share, made: Iterable[dist.ProcessGroup] = ()) -> None:
        self._share = share
        every = [*made, dist.group.WORLD]  # which stands for others of the same ranks
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {
            tuple(sorted(dist.get_process_group_ranks(group))): group
            for group in every
            if group is not None
        }

    def of(self, purpose: Purpose) -> dist.ProcessGroup:
        """Return this rank's group. KeyError where nobody made it."""
        return self._by_ranks[self._share.ranks(purpose)]

    def size(self, purpose: Purpose) -> int:
        """Return how many ranks it has, made or not."""
        return len(self._share.ranks(purpose))


def sender(share: Share) -> Send | None:
    """Return what sends a tensor from one of the ranks with equal weights, by its place among them,
    to the others; None where this rank is alone. All ranks make all groups.
    """
    ranks, group = share.ranks("replicas"), None
    if len(ranks) == 1:
        return None
    if len(ranks) < share.grid.world_size:
        groups = {ranks: dist.new_group(ranks) for ranks in share.every("replicas")}
        group = groups[ranks]

    def send(tensor: torch.Tensor, owner: int) -> None:
        dist.broadcast(tensor.view(torch.uint8), ranks[owner], group=group)

    return send
