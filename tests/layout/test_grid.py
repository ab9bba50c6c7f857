"""Ranks and coordinates, compared with DeepSpeed's topology; a rank's share."""

import itertools
from collections import Counter
from collections.abc import Mapping

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from harness.layout.box import Part, Range, share_of, share_of_fused, uncovered
from harness.layout.grid import GROUPS, Axis, Coords, Cutter, Grid, Purpose, Share

GRIDS = [Grid(1), Grid(8), Grid(8, pipeline=2), Grid(8, tensor=2, sequence=2)]
GRIDS += [Grid(24, pipeline=2, tensor=3, sequence=2)]
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


def test_tensor_peers_are_adjacent_and_sequence_peers_strided() -> None:
    grid = Grid(16, pipeline=2, tensor=2, sequence=2)
    assert grid.data == 2
    assert grid.group("tensor", 4) == (4, 5)
    assert grid.group("sequence", 4) == (4, 6)
    assert grid.group("data", 4) == (0, 4)
    assert grid.group("pipeline", 4) == (4, 12)
    assert grid.coords(15) == Coords(pipeline=1, data=1, sequence=1, tensor=1)


def test_indivisible_world_size_is_rejected_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"6 ranks .* pipeline 2 x tensor 2 x sequence 1 = 4"):
        Grid(6, pipeline=2, tensor=2)
    with pytest.raises(ValueError, match="tensor must be at least 1, not 0"):
        Grid(6, tensor=0)
    with pytest.raises(IndexError, match="rank 8 is not one of 8"):
        Grid(8).coords(8)


def test_grid_text_gives_rank_coordinates_on_model_axes() -> None:
    grid = Grid(8, pipeline=2, tensor=2)
    assert grid.described(0) == " (data 0, pipeline 0, tensor 0)"
    assert grid.described(6) == " (data 1, pipeline 1, tensor 0)"
    assert Grid(4, expert=2).described(3) == " (data 3, expert 1)"
    assert Grid(4).described(3) == ""


def shares(grid: Grid, cutters: Mapping[Axis, Cutter] | None = None) -> list[Share]:
    return [Share(grid, rank, cutters or {}) for rank in range(grid.world_size)]


def halves(
    name: str, shape: tuple[int, ...], place: int, places: int
) -> dict[int, tuple[Range, ...]]:
    """Return q, k and v each by rows, the output by columns; ranks share 2 key heads of 4."""
    match name:
        case "qkv":
            return {0: share_of_fused((shape[0] // 3,) * 3, place, places)}
        case "out":
            return {1: share_of(shape[1], place, places)}
        case "key":
            heads = share_of(2, place * 2 // places, 2)
            return {0: tuple((4 * start, 4 * stop) for start, stop in heads)}
    return {}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("purpose", GROUPS)
def test_groups_of_a_purpose_split_the_world(grid: Grid, purpose: Purpose) -> None:
    groups = {share.ranks(purpose) for share in shares(grid)}
    assert all(share.every(purpose) == tuple(sorted(groups)) for share in shares(grid))
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert all(share.rank in share.ranks(purpose) for share in shares(grid))
    assert len({len(group) for group in groups}) == 1


def test_grid_groups_over_all_axes() -> None:
    grid = Grid(16, pipeline=2, tensor=2, sequence=2)
    share = Share(grid, 7)  # stage 0, data 1, sequence 1, tensor 1
    assert share.ranks("loss") == tuple(range(1, 16, 2))
    assert share.ranks("norm") == tuple(range(16))
    assert share.ranks("model") == (6, 7, 14, 15)
    assert share.ranks("replicas") == (1, 3, 5, 7)
    assert share.ranks("data") == (3, 7)
    assert share.ranks("dropout") == (6, 7)
    assert share.dropout_rank == 6


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("samples", "micro"), [(24, 1), (25, 2), (1, 3), (48, 3), (0, 2)])
def test_every_token_is_read_by_one_summing_rank(grid: Grid, samples: int, micro: int) -> None:
    seq_len = 12
    readers: Counter[tuple[int, int]] = Counter()
    summing = Share(grid, 0).ranks("loss")
    first_stage = [r for r in summing if grid.coords(r).pipeline == 0]
    for share in (Share(grid, rank) for rank in first_stage):
        for start in share.starts(samples, micro):
            rows = range(start, min(start + micro, samples))
            readers.update(itertools.product(rows, range(*share.positions(seq_len))))
    assert readers == Counter(itertools.product(range(samples), range(seq_len)))
    assert len({len(share.starts(samples, micro)) for share in shares(grid)}) == 1


def test_micro_batches_are_dealt_out_in_turn_and_tokens_evenly() -> None:
    assert list(Share(Grid(4, pipeline=2), 3).starts(12, 2)) == [2, 6, 10]
    assert list(Share(Grid(2), 1).starts(5, 2)) == [2, 6]
    with pytest.raises(ValueError, match="7 tokens cannot be divided over 2 sequence ranks"):
        Share(Grid(2, sequence=2), 0).positions(7)


@pytest.mark.parametrize("name", ["qkv", "out", "norm"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_first_of_those_that_hold_the_same_have_it_once(grid: Grid, name: str) -> None:
    shape = (36, 24)
    replica = [Share(grid, r, {"tensor": halves}) for r in Share(grid, 0).ranks("model")]
    stage = [share for share in replica if grid.coords(share.rank).pipeline == 0]
    first = [share.part(name, shape) for share in stage if share.is_first(name, shape)]
    assert uncovered(first) is None
    assert len(first) == (1 if name == "norm" else grid.tensor)


def test_key_heads_that_ranks_share_are_counted_once() -> None:
    ranks = shares(Grid(4, tensor=4), {"tensor": halves})
    parts = [share.part("key", (8, 5)) for share in ranks]
    assert [part.ranges[0] for part in parts] == [((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)]
    assert [share.is_first("key", (8, 5)) for share in ranks] == [True, False, True, False]


def test_replicas_are_found_over_all_axes_but_stages() -> None:
    grid = Grid(16, pipeline=2, tensor=4)
    share = Share(grid, 5, {"tensor": halves})  # stage 0, data 1, tensor 1
    assert share.alike("norm", (8,)) == tuple(range(8))
    assert share.alike("out", (8, 8)) == (1, 5)
    assert share.alike("key", (8, 5)) == (0, 1, 4, 5)
    assert Share(grid, 14, {"tensor": halves}).alike("key", (8, 5)) == (10, 11, 14, 15)
    assert Share(Grid(4), 2).alike("out", (8, 8)) == (0, 1, 2, 3)


def test_axes_cut_one_after_the_other() -> None:
    """Experts are divided by number and by width; here, their number over the sequence ranks."""
    cutters: dict[Axis, Cutter] = {
        "sequence": lambda _, shape, *place: {0: share_of(shape[0], *place)},
        "tensor": lambda _, shape, *place: {1: share_of_fused((shape[1] // 2,) * 2, *place)},
    }
    both = shares(Grid(4, tensor=2, sequence=2), cutters)
    parts = [share.part("experts", (5, 8, 3)) for share in both]
    assert uncovered(parts) is None
    assert parts[3].ranges == (((3, 5),), ((2, 4), (6, 8)), ((0, 3),))


def test_without_cutters_a_rank_holds_all_of_a_parameter() -> None:
    assert Share(Grid(8, pipeline=2), 5).part("w", (3, 4)) == Part.of((3, 4))
    assert all(share.is_first("w", (3, 4)) for share in shares(Grid(8, pipeline=2)))
