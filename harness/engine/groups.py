"""The process groups in which a rank sums, counts and compares, by purpose."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from harness.engine.fragments import local_gradients, part_of
from harness.guard.replicas import largest_difference
from harness.layout.grid import Purpose, Share
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


def make_groups(share: Share, *purposes: Purpose) -> list[dist.ProcessGroup]:
    """Make the groups of all ranks for some purposes; return this rank's. Collective."""
    mine = []
    for purpose in purposes:
        for ranks in share.every(purpose):
            group = dist.new_group(ranks)
            if share.rank in ranks:
                mine.append(group)
    return mine


class ModelParallelUnit:
    """The answers that `deepspeed.initialize(mpu=...)` asks for where tensors are divided."""

    def __init__(self, groups: Groups) -> None:
        self.tensor_group, self.data_group = groups.of("tensor"), groups.of("replicas")

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that hold parts of one weight."""
        return self.tensor_group

    def get_model_parallel_world_size(self) -> int:
        """Return how many they are."""
        return self.tensor_group.size()

    def get_model_parallel_rank(self) -> int:
        """Return this rank's place among them."""
        return self.tensor_group.rank()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks over which ZeRO divides its states."""
        return self.data_group

    def get_data_parallel_world_size(self) -> int:
        """Return how many they are."""
        return self.data_group.size()

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place among them."""
        return self.data_group.rank()


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


def gradients_apart(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Return by how much the gradients of undivided parameters differ over the ranks of `group`, of
    the largest element; NaN where one is not finite. Collective.

    They differ where a plan to divide tensors forgets that a rank computes only a part of one.
    Valid between the last backward of a step and the step itself.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    apart = {}
    for parameter, gradient in local_gradients(module):
        if not part_of(parameter).is_whole or not gradient.numel():
            continue
        apart[names[id(parameter)]] = largest_difference(gradient, group, device)
    return apart
