"""Parts of a parameter: boxes of the full tensor, and flat ranges in them. grid.Share.part says
which of them a rank holds.

A parameter is sliced along its dimensions. A slice of a dimension is one range, or two or three
concatenated ranges if projections are fused: half of `[q | k | v]` is the first half of each. All
counts are in elements; all ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import prod

Range = tuple[int, int]


@dataclass(frozen=True)
class Box:
    """The elements from `start` to `stop` (exclusive) in every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements along each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """Return the intersection; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(int.__lt__, start, stop)) else None

    def moved(self, origin: tuple[int, ...], to: tuple[int, ...]) -> Box:
        """Return the box shifted so that point `origin` becomes `to`."""
        steps = [new - old for old, new in zip(origin, to, strict=True)]
        return Box(
            tuple(at + step for at, step in zip(self.start, steps, strict=True)),
            tuple(at + step for at, step in zip(self.stop, steps, strict=True)),
        )


@dataclass(frozen=True)
class Part:
    """A rank's slice of a parameter of shape `whole`: the product of its ranges.

    `ranges`: for each dimension, the ranges that it contains, ascending and concatenated. The
    rank's tensor has the slice's `shape`.
    """

    whole: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        """Join adjacent ranges, so that equal slices compare equal."""
        if len(self.ranges) != len(self.whole):
            raise ValueError(f"ranges of {len(self.ranges)} dimensions for {list(self.whole)}")
        joined = []
        for dimension, (size, ranges) in enumerate(zip(self.whole, self.ranges, strict=True)):
            edges = [0, *(edge for each in ranges for edge in each), size]
            if any(one > other for one, other in pairwise(edges)):
                raise ValueError(
                    f"{list(ranges)} are not ranges of dimension {dimension} of {list(self.whole)}"
                )
            joined.append(_joined(ranges))
        object.__setattr__(self, "ranges", tuple(joined))

    @classmethod
    def of(cls, whole: Sequence[int]) -> Part:
        """Return the whole of a parameter as a slice."""
        return cls(tuple(whole), tuple(((0, size),) for size in whole))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's tensor."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """True if it contains the whole parameter."""
        return self.numel == prod(self.whole)

    def cut(self, dimension: int, ranges: Sequence[Range]) -> Part:
        """Return the slice cut to `ranges` along one of its dimensions."""
        left = []
        for (start, stop), at in zip(self.ranges[dimension], self._ends(dimension), strict=True):
            for first, last in ranges:
                low, high = max(first, at), min(last, at + stop - start)
                if low < high:
                    left.append((start + low - at, start + high - at))
        cut = list(self.ranges)
        cut[dimension] = tuple(left)
        return Part(self.whole, tuple(cut))

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yield (box of the full tensor, the same elements as a box of the slice)."""
        of_dimensions = [
            list(zip(ranges, self._ends(dimension), strict=True))
            for dimension, ranges in enumerate(self.ranges)
        ]
        for ranges in product(*of_dimensions):
            box = Box(tuple(r[0] for r, _ in ranges), tuple(r[1] for r, _ in ranges))
            yield box, box.moved(box.start, tuple(at for _, at in ranges))

    def meets(self, other: Part) -> bool:
        """Return True if two slices of a parameter have an element in common."""
        return all(
            any(max(a, c) < min(b, d) for a, b in mine for c, d in theirs)
            for mine, theirs in zip(self.ranges, other.ranges, strict=True)
        )

    def _ends(self, dimension: int) -> list[int]:
        """Return the start of each range of a dimension within the slice."""
        lengths = [stop - start for start, stop in self.ranges[dimension]]
        return [0, *accumulate(lengths)][: len(lengths)]


@dataclass(frozen=True)
class Piece:
    """Elements [offset, offset + numel) of a flattened slice: a shard of ZeRO."""

    part: Part
    offset: int
    numel: int

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yield (box of the full tensor, the same elements as a box of the slice)."""
        for flat in flat_boxes(self.part.shape, self.offset, self.offset + self.numel):
            for whole, own in self.part.boxes():
                if both := own.meet(flat):
                    yield both.moved(own.start, whole.start), both


@dataclass(frozen=True)
class Overlap:
    """Elements of the parameter that two pieces have in common.

    They form a box of `shape`, with as few dimensions as possible. Element (i, j, ...) has index
    `first` + i x `strides[0]` + j x `strides[1]` + ... in each piece.
    """

    shape: tuple[int, ...]
    first: tuple[int, int]
    strides: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_flat(self) -> bool:
        """True if the elements are contiguous in both pieces."""
        return self.strides == ((1,), (1,))

    def span(self, side: int) -> int:
        """Return the number of elements of one piece from the first of these to the last."""
        steps = zip(self.shape, self.strides[side], strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)


def overlaps(one: Piece, other: Piece) -> Iterator[Overlap]:
    """Yield the overlaps of two pieces of a parameter; each common element once."""
    if one.part == other.part:
        start = max(one.offset, other.offset)
        numel = min(one.offset + one.numel, other.offset + other.numel) - start
        if numel > 0:
            yield Overlap((numel,), (start - one.offset, start - other.offset), ((1,), (1,)))
        return
    if not one.part.meets(other.part):
        return
    theirs = list(other.boxes())
    for (whole, mine), (their_whole, their_own) in product(one.boxes(), theirs):
        if both := whole.meet(their_whole):
            places = (
                (one, both.moved(whole.start, mine.start)),
                (other, both.moved(their_whole.start, their_own.start)),
            )
            yield _overlap(both.shape, places)


def _overlap(shape: tuple[int, ...], places: Sequence[tuple[Piece, Box]]) -> Overlap:
    """Return the overlap of boxes of one shape in two pieces."""
    strides = [_strides(piece.part.shape) for piece, _ in places]
    firsts = [
        sum(map(int.__mul__, box.start, steps)) - piece.offset
        for (piece, box), steps in zip(places, strides, strict=True)
    ]
    sizes: list[int] = []
    steps: list[tuple[int, int]] = []
    for size, mine, theirs in zip(shape, *strides, strict=True):
        step = (mine, theirs)
        if size == 1:
            continue
        if sizes and steps[-1] == (mine * size, theirs * size):  # contiguous in both: merge
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            steps.append(step)
    if not sizes:
        sizes, steps = [1], [(1, 1)]
    mine_steps, their_steps = zip(*steps, strict=True)
    return Overlap(tuple(sizes), (firsts[0], firsts[1]), (mine_steps, their_steps))


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        if start < stop:
            joined.append((start, stop))
    return tuple(joined)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements [start, stop) of a flattened tensor form, in order.

    There are at most 2 x dimensions - 1: the end of a row, full rows and the start of a row,
    recursively.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    length, rest = prod(shape[1:]), tuple(shape[1:])
    (first, head), (last, tail) = divmod(start, length), divmod(stop, length)
    if first == last:
        yield from _in_row(first, flat_boxes(rest, head, tail))
        return
    if head:
        yield from _in_row(first, flat_boxes(rest, head, length))
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in rest)), (last, *rest))
    yield from _in_row(last, flat_boxes(rest, 0, tail))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (Box((row, *box.start), (row + 1, *box.stop)) for box in boxes)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def share_of(size: int, place: int, places: int) -> tuple[Range, ...]:
    """Return range `place` of `places` nearly equal ranges, the longer ones first; () if empty."""
    each, left = divmod(size, places)
    start = place * each + min(place, left)
    stop = start + each + (place < left)
    return ((start, stop),) if start < stop else ()


def share_of_fused(sizes: Sequence[int], place: int, places: int) -> tuple[Range, ...]:
    """Return the same range of each of several concatenated blocks, such as q, k and v."""
    starts = [0, *accumulate(sizes)]
    return tuple(
        (at + start, at + stop)
        for at, size in zip(starts, sizes, strict=False)
        for start, stop in share_of(size, place, places)
    )


def uncovered(parts: Sequence[Part]) -> str | None:
    """Return why slices do not cover each element of a parameter once; None if they do."""
    for number, part in enumerate(parts):
        for other in parts[:number]:
            if part.meets(other):
                return f"{describe(other)} and {describe(part)} overlap"
    missing = prod(parts[0].whole) - sum(part.numel for part in parts)
    return f"{missing} elements are in none of its {len(parts)} slices" if missing else None


def describe(part: Part) -> str:
    """Return a slice in Python notation: `[0:4, 24:48+72:96]`."""
    cuts = ("+".join(f"{start}:{stop}" for start, stop in ranges) for ranges in part.ranges)
    return f"[{', '.join(cuts)}]"
