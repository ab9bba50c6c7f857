"""Divided parameters, compared with tensors that torch really splits."""

import itertools
import math
import random

import pytest
import torch

from harness.layout import box as box_module
from harness.layout.box import Box, Overlap, Part, Piece, Range, overlaps, share_of, uncovered

SHAPES = [(), (7,), (4, 6), (5, 1, 3), (3, 4, 5), (2, 3, 2, 3)]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose elements are their own indices."""
    return torch.arange(math.prod(shape)).view(shape)


def cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """Return a part of a whole tensor, split by torch."""
    for dimension, ranges in enumerate(part.ranges):
        pieces = [tensor.narrow(dimension, start, stop - start) for start, stop in ranges]
        tensor = torch.cat([*pieces, tensor.narrow(dimension, 0, 0)], dimension)
    return tensor


def own_tensor(part: Part) -> torch.Tensor:
    return cut(numbered(part.whole), part)


def own_elements(piece: Piece) -> torch.Tensor:
    """Return the numbers of a piece's elements, in its order."""
    return own_tensor(piece.part).reshape(-1)[piece.offset : piece.offset + piece.numel]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


def random_ranges(draw: random.Random, size: int) -> tuple[Range, ...]:
    """Return one to three ranges of a dimension."""
    edges = sorted(draw.sample(range(size + 1), min(size + 1, 2 * draw.randint(1, 3)) // 2 * 2))
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def random_part(draw: random.Random, shape: tuple[int, ...]) -> Part:
    return Part(shape, tuple(random_ranges(draw, size) for size in shape))


def random_piece(draw: random.Random, part: Part) -> Piece:
    start, stop = sorted(draw.choices(range(part.numel + 1), k=2))
    return Piece(part, start, stop - start)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_boxes_of_a_flat_range_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    tensor = numbered(shape)
    for start, stop in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        boxes = list(box_module.flat_boxes(shape, start, stop))
        elements = [n for box in boxes for n in tensor[slices(box)].reshape(-1).tolist()]
        assert elements == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        assert sum(box.numel for box in boxes) == stop - start


@pytest.mark.parametrize("seed", range(40))
def test_a_piece_knows_which_elements_of_the_whole_it_has(seed: int) -> None:
    draw = random.Random(seed)
    part = random_part(draw, draw.choice(SHAPES[1:]))
    piece, whole, own = random_piece(draw, part), numbered(part.whole), own_tensor(part)
    assert tuple(own.shape) == part.shape
    elements = []
    for of_whole, of_part in piece.boxes():
        assert torch.equal(whole[slices(of_whole)], own[slices(of_part)])
        elements += whole[slices(of_whole)].reshape(-1).tolist()
    assert sorted(elements) == sorted(own_elements(piece).tolist())


def copied(overlap: Overlap, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy from the second piece to the first."""
    (mine, theirs), (first, other) = overlap.strides, overlap.first
    assert overlap.span(1) <= source.numel() - other
    copy = source.as_strided(overlap.shape, theirs, other)
    target.as_strided(overlap.shape, mine, first).copy_(copy)


@pytest.mark.parametrize("seed", range(200))
def test_what_two_pieces_have_in_common_is_copied_once(seed: int) -> None:
    draw = random.Random(seed)
    shape = draw.choice(SHAPES)
    parts = [random_part(draw, shape), random_part(draw, shape), Part.of(shape)]
    one, other = (random_piece(draw, draw.choice(parts)) for _ in range(2))
    mine, theirs = own_elements(one), own_elements(other)
    target, count = torch.full_like(mine, -1), 0
    for overlap in overlaps(one, other):
        copied(overlap, theirs.clone(), target)
        count += overlap.numel
    common = set(mine.tolist()) & set(theirs.tolist())
    assert count == len(common)
    assert target.tolist() == [number if number in common else -1 for number in mine.tolist()]
    assert bool(common) <= one.part.meets(other.part)


def test_the_same_part_is_one_flat_range() -> None:
    part = Part.of((4, 6)).cut(1, ((0, 2), (4, 6)))
    (overlap,) = overlaps(Piece(part, 3, 8), Piece(part, 5, 9))
    assert overlap == Overlap((6,), (2, 0), ((1,), (1,)))
    assert overlap.is_flat


def test_whole_rows_are_one_flat_range_of_both() -> None:
    """A matrix divided by rows is read in one go, whoever wrote it."""
    rows = Part.of((8, 6)).cut(0, ((2, 5),))
    (overlap,) = overlaps(Piece(Part.of((8, 6)), 0, 48), Piece(rows, 0, 18))
    assert overlap == Overlap((18,), (12, 0), ((1,), (1,)))
    columns = Part.of((8, 6)).cut(1, ((2, 5),))
    (overlap,) = overlaps(Piece(Part.of((8, 6)), 0, 48), Piece(columns, 0, 24))
    assert overlap == Overlap((8, 3), (2, 0), ((6, 1), (3, 1)))
    assert overlap.span(0) == 45


def test_parts_that_are_equal_compare_equal() -> None:
    assert Part((6,), (((0, 2), (2, 4)),)) == Part((6,), (((0, 4),),))
    assert Part((6, 2), (((0, 3), (3, 6)), ((0, 2),))) == Part.of((6, 2))
    assert Part.of((6, 2)).is_whole
    assert not Part((6,), (((0, 4),),)).is_whole


@pytest.mark.parametrize(
    "ranges", [((0, 7),), ((2, 1),), ((0, 3), (2, 4)), ((3, 4), (0, 1)), ((-1, 2),)], ids=str
)
def test_invalid_box_ranges_are_rejected(ranges: tuple[Range, ...]) -> None:
    with pytest.raises(ValueError, match="are not ranges of dimension 0 of"):
        Part((6,), (ranges,))
    with pytest.raises(ValueError, match="ranges of 1 dimensions for"):
        Part((6, 2), (ranges,))


@pytest.mark.parametrize("places", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 3, 6, 7])
def test_shares_are_all_of_it_once_and_about_equal(size: int, places: int) -> None:
    shares = [share_of(size, place, places) for place in range(places)]
    assert [n for share in shares for r in share for n in range(*r)] == list(range(size))
    lengths = [sum(stop - start for start, stop in share) for share in shares]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1
    parts = [Part.of((size, 2)).cut(0, share) for share in shares]
    assert uncovered(parts) is None


def test_a_part_is_cut_again_in_its_own_coordinates() -> None:
    half = Part.of((12,)).cut(0, ((0, 3), (6, 9)))
    assert half.cut(0, ((2, 5),)).ranges == (((2, 3), (6, 8)),)
    assert half.cut(0, ((0, 6),)) == half
    assert half.cut(0, ()).numel == 0


@pytest.mark.parametrize("seed", range(40))
def test_cuts_of_cuts_are_what_torch_cuts(seed: int) -> None:
    draw = random.Random(seed)
    part = random_part(draw, (6, 7))
    dimension = draw.randrange(2)
    ranges = random_ranges(draw, part.shape[dimension]) if part.shape[dimension] else ()
    cut = part.cut(dimension, ranges)
    rows = [own_tensor(part).narrow(dimension, a, b - a) for a, b in ranges]
    expected = torch.cat(rows, dimension) if rows else own_tensor(part).narrow(dimension, 0, 0)
    assert torch.equal(own_tensor(cut), expected)


def test_parts_that_are_not_the_whole_are_named() -> None:
    whole = Part.of((4, 6))
    left, right = (whole.cut(1, share_of(6, place, 2)) for place in range(2))
    top = whole.cut(0, ((0, 2),))
    assert uncovered([whole]) is None
    assert uncovered([right, left]) is None
    assert uncovered([left]) == "12 elements are in none of its 1 slices"
    assert uncovered([left, right, top]) == "[0:4, 0:3] and [0:2, 0:6] overlap"
    assert uncovered([left, left]) == "[0:4, 0:3] and [0:4, 0:3] overlap"
    fused = whole.cut(1, box_module.share_of_fused((3, 3), 0, 2))
    assert box_module.describe(fused) == "[0:4, 0:2+3:5]"
