"""Exchanges objects between ranks through rank 0, which gathers them and broadcasts the result.

With an all-gather, every rank would receive as many messages as there are ranks.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks on rank 0, an empty list on the others. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(value, values or None)
    return values


def broadcast_object(value: T) -> T:
    """Return rank 0's value on every rank. Collective."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def first_problem(problem: str | None) -> str | None:
    """Return the problem of the first rank that has one, on every rank. Collective."""
    return broadcast_object(next(filter(None, gather_objects(problem)), None))
