"""The process groups of a rank, by purpose."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from harness.engine.fragments import local_gradients, part_of
from harness.guard.replicas import largest_difference
from harness.layout.grid import Purpose, Share
from harness.models.initialize import Send


class Groups:
    """The groups of a `share`, which are looked up among the groups `made` and the world group."""

    def __init__(self, share: Share, made: Iterable[dist.ProcessGroup | None] = ()) -> None:
        self._share = share
        every = [*made, dist.group.WORLD]  # WORLD replaces other groups of all ranks
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {
            tuple(sorted(dist.get_process_group_ranks(group))): group
            for group in every
            if group is not None
        }

    def of(self, purpose: Purpose) -> dist.ProcessGroup:
        """Return this rank's group. Raises KeyError if it was not created."""
        return self._by_ranks[self._share.ranks(purpose)]

    def among(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of exactly these ranks if there are several and it was created."""
        return self._by_ranks.get(ranks) if len(ranks) > 1 else None

    def size(self, purpose: Purpose) -> int:
        """Return the number of ranks in the group, created or not."""
        return len(self._share.ranks(purpose))


def make_groups(share: Share, *purposes: Purpose) -> list[dist.ProcessGroup]:
    """Create the groups of all ranks for some purposes; return this rank's. Collective."""
    mine = []
    for purpose in purposes:
        for ranks in share.every(purpose):
            group = dist.new_group(ranks)
            if share.rank in ranks:
                mine.append(group)
    return mine


class ModelParallelUnit:
    """The `mpu` argument of `deepspeed.initialize` for tensor parallelism."""

    def __init__(self, groups: Groups) -> None:
        self.tensor_group, self.data_group = groups.of("tensor"), groups.of("replicas")

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the tensor-parallel group."""
        return self.tensor_group

    def get_model_parallel_world_size(self) -> int:
        """Return the size of the tensor-parallel group."""
        return self.tensor_group.size()

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number in the tensor-parallel group."""
        return self.tensor_group.rank()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the group over which ZeRO shards its states."""
        return self.data_group

    def get_data_parallel_world_size(self) -> int:
        """Return the size of the data-parallel group."""
        return self.data_group.size()

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number in the data-parallel group."""
        return self.data_group.rank()


def sender(share: Share) -> Send | None:
    """Return a function that broadcasts among replicas; None without them. Collective."""
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
    """Return, for each unsliced parameter, the largest difference of its gradient over `group`,
    relative to its largest element; NaN if one is not finite. Collective.

    They differ if a tensor-parallel plan ignores that each rank computes only a part of them. Valid
    between the last backward pass of a step and the optimizer step.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    apart = {}
    for parameter, gradient in local_gradients(module):
        if not part_of(parameter).is_whole or not gradient.numel():
            continue
        apart[names[id(parameter)]] = largest_difference(gradient, group, device)
    return apart
