"""Differentiable exchanges between the ranks of a group; collective unless noted.

Each docstring states the backward pass: the backward of a copy is a sum, and vice versa.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.nn import functional

Group = dist.ProcessGroup
Way = Callable[[torch.Tensor], torch.Tensor]
# torch 2.13 has new names for both.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


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


def gathered_for_parts(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Return the ranks' slices concatenated, for sharded weights; backward: sum over the ranks, and
    take this rank's slice.
    """
    there = partial(gathered, dimension=dimension, group=group)
    return _there_and_back(tensor, there, partial(summed_slice, dimension=dimension, group=group))


def scattered_sum(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Return this rank's slice of the sum over the ranks; backward: concatenate the slices'
    gradients.
    """
    there = partial(summed_slice, dimension=dimension, group=group)
    return _there_and_back(tensor, there, partial(gathered, dimension=dimension, group=group))


class Readers:
    """Linear maps that read what `gathered_for_parts` made of a rank's slice. They keep the slice,
    and the first of them to run backward gathers it again for all (arXiv 2205.05198, 4.2.2).
    """

    def __init__(self, group: Group) -> None:
        self._group, self._waiting = group, 0
        self._whole: torch.Tensor | None = None

    def linear(
        self,
        whole: torch.Tensor,
        own: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return functional.linear of the whole tensor that was made of this rank's `own` slice."""
        self._waiting += 1
        output: torch.Tensor = _Linear.apply(whole, own, weight, bias, self)  # type: ignore[no-untyped-call]
        return output

    def again(self, own: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor to a linear map's backward pass; the last one frees it."""
        whole = self._whole
        if whole is None:
            whole = gathered(own, own.ndim - 2, self._group)
        self._waiting -= 1
        self._whole = whole if self._waiting else None
        return whole


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
    own, dimension = tensor.contiguous(), dimension % tensor.ndim
    parts = own.new_empty(group.size() * len(own), *own.shape[1:])
    _all_gather(parts, own, group=group)
    by_rank = parts.view(group.size(), *own.shape).movedim(0, dimension)
    return by_rank.flatten(dimension, dimension + 1)


def summed_slice(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Return this rank's slice of the sum over the ranks; without autograd."""
    before, after = tensor.shape[:dimension], tensor.shape[dimension + 1 :]
    parts = tensor.reshape(*before, group.size(), -1, *after).movedim(dimension, 0).contiguous()
    own = torch.empty_like(parts[0])
    _reduce_scatter(own, parts.flatten(0, 1), group=group)
    return own


def own_slice(tensor: torch.Tensor, dimension: int, group: Group) -> torch.Tensor:
    """Return a copy of this rank's slice of a tensor that all ranks have; not collective."""
    own = tensor.chunk(group.size(), dimension)[group.rank()]
    return own.clone(memory_format=torch.contiguous_format)  # a view would keep the whole


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


class _Linear(Function):
    """A linear map that keeps its rank's slice of its input."""

    @staticmethod
    def forward(
        context: Any,
        whole: torch.Tensor,
        own: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        readers: Readers,
    ) -> torch.Tensor:
        context.save_for_backward(own, weight)
        context.readers = readers
        return functional.linear(whole, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        own, weight = (saved.to(gradient.dtype) for saved in context.saved_tensors)  # autocast's
        inputs, rows = context.readers.again(own).flatten(0, -2), gradient.flatten(0, -2)
        of_weight = rows.t() @ inputs if context.needs_input_grad[2] else None
        of_bias = rows.sum(0) if context.needs_input_grad[3] else None
        return gradient @ weight, None, of_weight, of_bias, None


class _Reordered(Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(order)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (order,) = context.saved_tensors
        return gradient.index_select(0, order), None
