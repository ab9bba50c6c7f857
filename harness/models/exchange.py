"""Differentiable exchanges between the ranks of a group; collective unless noted.

Each docstring states the backward pass: the backward of a copy is a sum, and vice versa.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

Group = dist.ProcessGroup
Way = Callable[[torch.Tensor], torch.Tensor]


def copied(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return a tensor that all ranks share, for sharded weights; backward: sum over the ranks."""
    return _there_and_back(tensor, _same, partial(summed, group=group))


def added(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the ranks; backward: each rank gets the full gradient."""
    return _there_and_back(tensor, partial(summed, group=group), _same)


def joined(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Return the ranks' slices concatenated; backward: take this rank's slice of the gradient."""
    there = partial(gathered, dimension=dimension, group=group)
    return _there_and_back(tensor, there, partial(own_slice, dimension=dimension, group=group))


def sliced(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Return this rank's slice of a shared tensor; backward: concatenate the slices' gradients."""
    there = partial(own_slice, dimension=dimension, group=group)
    return _there_and_back(tensor, there, partial(gathered, dimension=dimension, group=group))


def sent(tensor: torch.Tensor, receive: list[int], send: list[int], group: Group) -> torch.Tensor:
    """Send each rank its rows, which are ordered by rank, and return the rows received; backward:
    the reverse. `receive`, `send`: number of rows per rank.
    """
    there = partial(_sent, receive=receive, send=send, group=group)
    return _there_and_back(tensor, there, partial(_sent, receive=send, send=receive, group=group))


def exchanged(tensor: torch.Tensor, cut: int, joined: int, group: Group) -> torch.Tensor:
    """Return this rank's slice along dimension `cut` of the ranks' tensors, which are concatenated
    along `joined` (an all-to-all); backward: the reverse.
    """
    there = partial(_exchanged, cut=cut, joined=joined, group=group)
    return _there_and_back(tensor, there, partial(_exchanged, cut=joined, joined=cut, group=group))


def reordered(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `rows` moved to the indices in `order`; not collective.

    torch's own backward passes would save the rows, or accumulate gradients of which each row has
    one.
    """
    output: torch.Tensor = _Reordered.apply(rows, order)  # type: ignore[no-untyped-call]
    return output


def summed(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the group's ranks, in new memory; without autograd."""
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def gathered(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Return the ranks' tensors concatenated along a dimension; without autograd."""
    own = tensor.contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, dimension)


def own_slice(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Return this rank's slice of a tensor that all ranks have; not collective."""
    return tensor.chunk(group.size(), dimension)[group.rank()].contiguous()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _sent(tensor: torch.Tensor, receive: list[int], send: list[int], group: Group) -> torch.Tensor:
    received = tensor.new_empty(sum(receive), *tensor.shape[1:])
    dist.all_to_all_single(received, tensor.contiguous(), receive, send, group=group)
    return received


def _exchanged(tensor: torch.Tensor, cut: int, joined: int, group: Group) -> torch.Tensor:
    slices = torch.stack(tensor.chunk(group.size(), cut))
    received = torch.empty_like(slices)
    dist.all_to_all_single(received, slices, group=group)
    return torch.cat(received.unbind(), joined)


def _there_and_back(tensor: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
    output: torch.Tensor = _ThereAndBack.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return output


class _ThereAndBack(Function):
    """One exchange in the forward pass, and another one for the gradient."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
        context.back = back
        return there(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return context.back(gradient), None, None


class _Reordered(Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(order)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (order,) = context.saved_tensors
        return gradient.index_select(0, order), None
