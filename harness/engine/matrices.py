"""Whole matrices for an optimizer that is given flat pieces of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz

from harness.engine.deepspeed_0_19 import internals
from harness.engine.state import flat_of, pieces


@dataclass(frozen=True)
class _Matrix:
    """One matrix, or a stack of them: where it lies on which ranks."""

    shape: tuple[int, ...]
    offset: int
    start: int
    numel: int  # of it on this rank: elements from `offset` on, at `start` of the flat tensor
    holders: tuple[int, ...]  # ranks of the group with a piece of it; none where all have all of it


class Matrices:
    """The matrices that `engine` steps with Muon, by the flat tensor that their pieces lie in.

    `group`: the ranks that the states are spread over. Collective.
    """

    def __init__(
        self, engine: Any, module: torch.nn.Module, names: set[str], group: dist.ProcessGroup | None
    ) -> None:
        self._group = group or dist.group.WORLD
        self._device = engine.device
        self._rank = dist.get_rank(self._group)
        places = {place.name: place for place in pieces(engine, module) if place.name in names}
        spread: list[Any] = [None] * dist.get_world_size(self._group)
        mine = {name for name, place in places.items() if not place.replicated}
        dist.all_gather_object(spread, mine, group=self._group)
        self._of: dict[int, list[_Matrix]] = defaultdict(list)
        for name, parameter in module.named_parameters():
            if name not in names:
                continue
            shape = internals.whole_shape(parameter)
            holders = tuple(rank for rank, names_there in enumerate(spread) if name in names_there)
            place = places.get(name)
            position = (place.offset, place.start, place.numel) if place else (0, 0, 0)
            self._of[id(flat_of(engine, parameter))].append(_Matrix(shape, *position, holders))

    def orthogonalized(
        self, flat: torch.Tensor, update: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield (a matrix's orthogonalised piece, its place in `flat`, its longer side) of each.

        A matrix on one rank is that rank's work; one on several is put together on one of them,
        turn by turn. Pieces are exchanged in bf16, as the arithmetic is: nothing is lost.
        Collective if a matrix is split.
        """
        source, target = update.view(-1), flat.detach().view(-1)
        split = []
        for matrix in self._of[id(flat)]:
            if len(matrix.holders) > 1:
                split.append(matrix)
            elif matrix.numel:
                yield _part(matrix, _orthogonal(self._filled(matrix, source)), target)
        ranks = dist.get_world_size(self._group)
        for start in range(0, len(split), ranks):  # in which a rank has one to work on, or two
            yield from self._of_several(split[start : start + ranks], source, target)

    def _of_several(
        self, matrices: list[_Matrix], source: torch.Tensor, target: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Of matrices with pieces on several ranks, each of which works on its own."""
        mine: dict[int, torch.Tensor] = {}
        for number, matrix in enumerate(matrices):
            whole, owner = self._filled(matrix, source), _owner(number, matrix)
            dist.reduce(whole, group_dst=owner, group=self._group)
            if owner == self._rank:
                mine[number] = _orthogonal(whole)
        for number, matrix in enumerate(matrices):
            if number in mine:
                whole = mine.pop(number)
            else:
                whole = torch.empty(matrix.shape, dtype=torch.bfloat16, device=self._device)
            dist.broadcast(whole, group_src=_owner(number, matrix), group=self._group)
            if matrix.numel:
                yield _part(matrix, whole, target)

    def _filled(self, matrix: _Matrix, source: torch.Tensor) -> torch.Tensor:
        """A matrix with this rank's piece in it, zeros elsewhere."""
        whole = torch.zeros(matrix.shape, dtype=torch.bfloat16, device=self._device)
        piece = source.narrow(0, matrix.start, matrix.numel)
        whole.view(-1).narrow(0, matrix.offset, matrix.numel).copy_(piece)
        return whole


def _part(
    matrix: _Matrix, whole: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return this rank's piece of `whole`, its place in `target`, and the longer side."""
    piece = whole.view(-1).narrow(0, matrix.offset, matrix.numel)
    place = target.narrow(0, matrix.start, matrix.numel)
    return piece.to(place.device), place, max(matrix.shape[-2:])


def _owner(number: int, matrix: _Matrix) -> int:
    return matrix.holders[number % len(matrix.holders)]


def _orthogonal(whole: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrix, roughly; of each in a stack of experts."""
    for matrix in whole.view(-1, *whole.shape[-2:]):
        coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
        matrix.copy_(_zeropower_via_newtonschulz(matrix.clone(), coefficients, 5, 1e-7))
    return whole
