"""Exchanges between the ranks of a group that autograd passes through; all are collective.

Each says what its backward pass does: that of a copy is a sum, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

Group = dist.ProcessGroup
Way = Callable[[torch.Tensor], torch.Tensor]


def copied(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Hand what all ranks have to weights that are divided: its gradients are added up."""
    return _there_and_back(tensor, _same, partial(summed, group=group))


def added(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Add up the ranks' parts of a sum, with which all go on: each has the whole gradient."""
    return _there_and_back(tensor, partial(summed, group=group), _same)


def joined(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Lay the ranks' slices end to end, with which all go on: each takes its slice's gradient."""
    there = partial(gathered, dimension=dimension, group=group)
    return _there_and_back(tensor, there, partial(own_slice, dimension=dimension, group=group))


def sliced(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Take the own slice of what all ranks have: the slices' gradients are laid end to end."""
    there = partial(own_slice, dimension=dimension, group=group)
    return _there_and_back(tensor, there, partial(gathered, dimension=dimension, group=group))


def sent(tensor: torch.Tensor, receive: list[int], send: list[int], group: Group) -> torch.Tensor:
    """Send each rank its rows, which lie in the order of the ranks, and take those for this rank:
    gradients take the way back. `receive`, `send`: rows of each rank.
    """
    there = partial(_sent, receive=receive, send=send, group=group)
    return _there_and_back(tensor, there, partial(_sent, receive=send, send=receive, group=group))


def exchanged(tensor: torch.Tensor, cut: int, joined: int, group: Group) -> torch.Tensor:
    """Give every rank its slice along one dimension of what the ranks have slices of along another,
    laid end to end (an all-to-all): gradients go back the same way.
    """
    there = partial(_exchanged, cut=cut, joined=joined, group=group)
    return _there_and_back(tensor, there, partial(_exchanged, cut=joined, joined=cut, group=group))


def reordered(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the rows that `rows` takes by `order`, at their own places; of no other rank.

    torch's ways back keep the rows, or add up gradients of which each row has one.
    """
    output: torch.Tensor = _Reordered.apply(rows, order)  # type: ignore[no-untyped-call]
    return output


def summed(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the group's ranks, in memory of its own; without autograd."""
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def gathered(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Return the ranks' tensors laid end to end along a dimension; without autograd."""
    own = tensor.contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, dimension)


def own_slice(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Return the own slice of what all ranks have; no exchange."""
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
    """One exchange of a tensor, and another one of its gradient."""

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
