"""Marks on parameters that an axis divides: which ranks save them, and which count them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.engine.fragments import grad_norm, is_copy, note_copies, part_of
from harness.layout.box import Part, Range, share_of
from harness.layout.grid import Grid, Share


def by_rows(
    name: str, shape: tuple[int, ...], place: int, places: int
) -> dict[int, tuple[Range, ...]]:
    return {0: share_of(shape[0], place, places)} if name == "cut" else {}


class Halves(nn.Module):
    """A matrix whose rows are divided over ranks, and a norm on both."""

    def __init__(self, share: Share) -> None:
        super().__init__()
        part = share.part("cut", (4, 2))
        self.cut, self.norm = nn.Parameter(torch.ones(part.shape)), nn.Parameter(torch.ones(3))
        self.cut.part = part  # type: ignore[attr-defined]
        note_copies(self, share)


def halves() -> list[Halves]:
    grid = Grid(2, tensor=2)
    return [Halves(Share(grid, rank, {"tensor": by_rows})) for rank in range(2)]


def test_a_parameter_is_all_of_the_models_or_the_part_that_was_left_on_it() -> None:
    for rank, module in enumerate(halves()):
        assert part_of(module.norm) == Part.of((3,))
        assert part_of(module.cut).ranges[0] == ((2 * rank, 2 * rank + 2),)


def test_what_is_not_cut_is_the_first_ranks() -> None:
    assert [[is_copy(m.cut), is_copy(m.norm)] for m in halves()] == [[False, False], [False, True]]


def test_squares_of_all_ranks_add_up_to_those_of_the_whole() -> None:
    squares = 0.0
    for module in halves():
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        squares += grad_norm(module, None, torch.device("cpu")).item() ** 2
    assert squares == pytest.approx(4 * (8 + 3), rel=1e-6)


def test_without_such_an_axis_nothing_is_a_copy() -> None:
    module = nn.Linear(2, 3)
    note_copies(module, Share(Grid(4, pipeline=2), 3))
    assert not any(map(is_copy, module.parameters()))
    module.bias.ds_pipe_replicated = True  # type: ignore[attr-defined]
    assert is_copy(module.bias)
