"""Exchanges objects between ranks through rank 0, which gathers them and broadcasts the result.

With an all-gather, every rank would receive as many messages as there are ranks.
"""

import sys
from typing import Any, TypeVar

T = TypeVar("T")


def _group() -> Any:
    """Return torch.distributed if this process has joined others, else None. One that has not
    imported it, such as a dry run, which has no torch, has joined none.
    """
    group = sys.modules.get("torch.distributed")
    return group if group is not None and group.is_initialized() else None


def rank_and_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, (0, 1) if it has joined no others."""
    group = _group()
    return (0, 1) if group is None else (group.get_rank(), group.get_world_size())


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks on rank 0, an empty list on the others. Collective."""
    group = _group()
    if group is None:
        return [value]
    values: list[Any] = [None] * group.get_world_size() if group.get_rank() == 0 else []
    group.gather_object(value, values or None)
    return values


def broadcast_object(value: T) -> T:
    """Return rank 0's value on every rank. Collective."""
    values, group = [value], _group()
    if group is not None:
        group.broadcast_object_list(values)
    return values[0]


def first_problem(problem: str | None) -> str | None:
    """Return the problem of the first rank that has one, on every rank. Collective."""
    return broadcast_object(next(filter(None, gather_objects(problem)), None))
