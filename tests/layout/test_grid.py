"""Rank <-> coordinates, held against DeepSpeed's own topology."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from harness.layout.grid import Coords, Grid
from tests.layout.grids import GRIDS

BOXES = [*GRIDS, Grid(96, pipeline=4, tensor=2, sequence=3)]


@pytest.mark.parametrize("grid", BOXES, ids=str)
def test_rank_and_coords_are_inverse(grid: Grid) -> None:
    places = [grid.coords(rank) for rank in range(grid.world_size)]
    assert [grid.rank(place) for place in places] == list(range(grid.world_size))
    assert len(set(places)) == grid.world_size


@pytest.mark.parametrize(("pipeline", "data", "tensor"), [(2, 3, 4), (1, 4, 2), (4, 2, 1)])
def test_order_of_axes_is_deepspeeds(pipeline: int, data: int, tensor: int) -> None:
    topology = PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data)
    grid = Grid(pipeline * data * tensor, pipeline=pipeline, tensor=tensor)
    for rank in range(grid.world_size):
        theirs, ours = topology.get_coord(rank), grid.coords(rank)
        assert (theirs.pipe, theirs.data, theirs.model) == (ours.pipeline, ours.data, ours.tensor)
    assert [list(group) for group in grid.groups("data")] == topology.get_axis_comm_lists("data")


def test_tensor_peers_are_neighbours_and_sequence_peers_stride_over_them() -> None:
    grid = Grid(16, pipeline=2, tensor=2, sequence=2)
    assert grid.data == 2
    assert grid.group("tensor", 4) == (4, 5)
    assert grid.group("sequence", 4) == (4, 6)
    assert grid.group("data", 4) == (0, 4)
    assert grid.group("pipeline", 4) == (4, 12)
    assert grid.coords(15) == Coords(pipeline=1, data=1, sequence=1, tensor=1)


@pytest.mark.parametrize("axis", ["pipeline", "data", "sequence", "tensor"])
def test_groups_split_the_world(axis: str) -> None:
    grid = Grid(24, pipeline=2, tensor=3, sequence=2)
    groups = grid.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(24))
    assert {len(group) for group in groups} == {getattr(grid, axis)}


def test_a_world_that_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"6 ranks .* pipeline 2 x tensor 2 x sequence 1 = 4"):
        Grid(6, pipeline=2, tensor=2)
    with pytest.raises(ValueError, match="tensor must be at least 1, not 0"):
        Grid(6, tensor=0)
    with pytest.raises(IndexError, match="rank 8 is not one of 8"):
        Grid(8).coords(8)


def test_a_rank_says_its_place_on_every_axis_that_divides_the_model() -> None:
    grid = Grid(8, pipeline=2, tensor=2)
    assert grid.described(0) == " (data 0, pipeline 0, tensor 0)"
    assert grid.described(6) == " (data 1, pipeline 1, tensor 0)"
    assert Grid(4, expert=2).described(3) == " (data 3, expert 1)"
    assert Grid(4).described(3) == ""
