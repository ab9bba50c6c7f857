"""The elements of a parameter that a rank holds: boxes of the whole, and flat ranges within them.

A parameter is cut along its dimensions, each into one range or, where projections are fused, into
two or three that are laid end to end: `[q | k | v]` in two is the first half of each.  All counts
are of elements, all ranges half open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import prod

Range = tuple[int, int]


@dataclass(frozen=True)
class Box:
    """The elements from `start` up to `stop`, in every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Elements in it."""
        return prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """Return what both hold; None for nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(int.__lt__, start, stop)) else None

    def moved(self, origin: tuple[int, ...], to: tuple[int, ...]) -> Box:
        """Return the same elements where `origin` is called `to`."""
        steps = [new - old for old, new in zip(origin, to, strict=True)]
        return Box(
            tuple(at + step for at, step in zip(self.start, steps, strict=True)),
            tuple(at + step for at, step in zip(self.stop, steps, strict=True)),
        )


@dataclass(frozen=True)
class Part:
    """One rank's part of a parameter of the shape `whole`: the product of its ranges.

    `ranges`: per dimension, those that it holds, ascending, laid end to end. A rank's own tensor
    has the part's `shape`.
    """

    whole: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        """Join ranges that touch: equal parts compare equal."""
        if len(self.ranges) != len(self.whole):
            raise ValueError(f"{len(self.ranges)} dimensions are cut of {list(self.whole)}")
        joined = []
        for dimension, (size, ranges) in enumerate(zip(self.whole, self.ranges, strict=True)):
            edges = [0, *(edge for each in ranges for edge in each), size]
            if any(one > other for one, other in pairwise(edges)):
                raise ValueError(
                    f"{list(ranges)} are no ranges of dimension {dimension} of {list(self.whole)}"
                )
            joined.append(_joined(ranges))
        object.__setattr__(self, "ranges", tuple(joined))

    @classmethod
    def of(cls, whole: Sequence[int]) -> Part:
        """Return all of a parameter."""
        return cls(tuple(whole), tuple(((0, size),) for size in whole))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that the rank has."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def numel(self) -> int:
        """Elements in it."""
        return prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """True if it is all of the parameter."""
        return self.numel == prod(self.whole)

    def cut(self, dimension: int, ranges: Sequence[Range]) -> Part:
        """Return what `ranges` of one of its own dimensions leave of it."""
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
        """Yield (box of the whole, the same elements as a box of the part) of all that it holds."""
        of_dimensions = [
            list(zip(ranges, self._ends(dimension), strict=True))
            for dimension, ranges in enumerate(self.ranges)
        ]
        for ranges in product(*of_dimensions):
            box = Box(tuple(r[0] for r, _ in ranges), tuple(r[1] for r, _ in ranges))
            yield box, box.moved(box.start, tuple(at for _, at in ranges))

    def meets(self, other: Part) -> bool:
        """Return whether two parts of one parameter have an element in common."""
        return all(
            any(max(a, c) < min(b, d) for a, b in mine for c, d in theirs)
            for mine, theirs in zip(self.ranges, other.ranges, strict=True)
        )

    def _ends(self, dimension: int) -> list[int]:
        """Return the begin of each range of a dimension in the part."""
        lengths = [stop - start for start, stop in self.ranges[dimension]]
        return [0, *accumulate(lengths)][: len(lengths)]


@dataclass(frozen=True)
class Piece:
    """Elements [offset, offset + numel) of a part, flattened: what a rank of ZeRO has of it."""

    part: Part
    offset: int
    numel: int

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yield (box of the whole, the same elements as a box of the part) of all that it holds."""
        for flat in flat_boxes(self.part.shape, self.offset, self.offset + self.numel):
            for whole, own in self.part.boxes():
                if both := own.meet(flat):
                    yield both.moved(own.start, whole.start), both


@dataclass(frozen=True)
class Overlap:
    """Elements of two pieces that are the same elements of the parameter.

    They are a box of `shape`, with as few dimensions as it can have. Element (i, j, ...) is number
    `first` + i x `strides[0]` + j x `strides[1]` + ... of either piece.
    """

    shape: tuple[int, ...]
    first: tuple[int, int]
    strides: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def numel(self) -> int:
        """Elements in it."""
        return prod(self.shape)

    @property
    def is_flat(self) -> bool:
        """Return True if they follow each other in both pieces."""
        return self.strides == ((1,), (1,))

    def span(self, side: int) -> int:
        """Return the elements of one piece from the first of these to the last."""
        steps = zip(self.shape, self.strides[side], strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)


def overlaps(one: Piece, other: Piece) -> Iterator[Overlap]:
    """Yield what two pieces of one parameter have in common, every element once."""
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
    """Of boxes of one shape in two pieces."""
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
        if sizes and steps[-1] == (mine * size, theirs * size):  # both go on where the row ends
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
    """Yield the boxes that elements [start, stop) of a flattened tensor come to, in their order.

    There are at most twice as many as dimensions, less one: the end of a row, whole rows, the
    beginning of one, and so on in these.
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
    """Return the `place`-th of `places` ranges of about equal length, the longer ones first; none
    where there are fewer elements.
    """
    each, left = divmod(size, places)
    start = place * each + min(place, left)
    stop = start + each + (place < left)
    return ((start, stop),) if start < stop else ()


def share_of_fused(sizes: Sequence[int], place: int, places: int) -> tuple[Range, ...]:
    """Return the same of each of several blocks that lie end to end, such as q, k and v."""
    starts = [0, *accumulate(sizes)]
    return tuple(
        (at + start, at + stop)
        for at, size in zip(starts, sizes, strict=False)
        for start, stop in share_of(size, place, places)
    )


def uncovered(parts: Sequence[Part]) -> str | None:
    """Return why the parts of one parameter are not all of its elements, each once; None where
    they are.
    """
    for number, part in enumerate(parts):
        for other in parts[:number]:
            if part.meets(other):
                return f"{describe(other)} and {describe(part)} overlap"
    missing = prod(parts[0].whole) - sum(part.numel for part in parts)
    return f"{missing} elements are in none of its {len(parts)} parts" if missing else None


def describe(part: Part) -> str:
    """Return a part as people write it: `[0:4, 24:48+72:96]`."""
    cuts = ("+".join(f"{start}:{stop}" for start, stop in ranges) for ranges in part.ranges)
    return f"[{', '.join(cuts)}]"
