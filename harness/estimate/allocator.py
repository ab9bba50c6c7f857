"""torch's caching allocator for GPU memory, as far as it decides how much is reserved.

A request is rounded up to 512 bytes and served from the smallest free block of its stream that is
large enough; what is left over stays a block of its own. Where none is, a segment is reserved:
2 MiB for requests up to 1 MiB, 20 MiB below 10 MiB, else the request rounded up to 2 MiB. Freed
neighbours within a segment merge, and segments are kept (c10/cuda/CUDACachingAllocator.cpp, torch
2.13). With `expandable_segments` each stream has one segment that grows by pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_ROUND = 512
_SMALL = 2**20  # bytes; larger requests come from another pool
_SMALL_SEGMENT = 2 * 2**20
_LARGE_SEGMENT = 20 * 2**20
_OWN_SEGMENT = 10 * 2**20  # requests from here on get a segment of their size
_SEGMENT_ROUND = 2 * 2**20

_Key = tuple[str, bool]
"""A stream, and whether requests are small."""


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment."""

    pool: _Key
    size: int
    serial: int
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False
    asked: int = 0


@dataclass
class Allocator:
    """Segments and blocks of one device; sizes in bytes."""

    expandable: bool = False
    reserved: int = 0
    allocated: int = 0
    most_allocated: int = 0
    _free: dict[_Key, list[tuple[int, int, Block]]] = field(default_factory=dict)
    _ends: dict[_Key, Block] = field(default_factory=dict)
    _serial: int = 0

    def allocate(self, size: int, stream: str = "") -> Block:
        """Return a block of at least `size` bytes for a stream."""
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        pool = (stream, size <= _SMALL)
        block = self._best(pool, size) or self._reserve(pool, size)
        rest = block.size - size
        if rest >= _ROUND and (pool[1] or self.expandable or rest > _SMALL):
            self._split(block, size)
        block.is_free, block.asked = False, size
        self.allocated += block.asked
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its stream, merged with free neighbours."""
        self.allocated -= block.asked
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._take(other)
                block = self._merged(*((other, block) if other is block.before else (block, other)))
        self._keep(block)

    def _best(self, pool: _Key, size: int) -> Block | None:
        free = self._free.setdefault(pool, [])
        index = bisect_left(free, (size,))
        return free.pop(index)[2] if index < len(free) else None

    def _reserve(self, pool: _Key, size: int) -> Block:
        is_small = pool[1]
        if self.expandable:
            return self._grown(pool, size, _SMALL_SEGMENT if is_small else _LARGE_SEGMENT)
        if is_small:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
        self.reserved += segment
        return self._new(pool, segment)

    def _grown(self, pool: _Key, size: int, page: int) -> Block:
        """Return a block at the end of the stream's segment, which grows by whole pages."""
        end = self._ends.get(pool)
        has_room = end is not None and end.is_free
        missing = size - (end.size if has_room and end else 0)
        more = -(-missing // page) * page
        self.reserved += more
        if end is not None and has_room:
            self._take(end)
            end.size += more
            return end
        block = self._new(pool, more)
        block.before = end
        if end is not None:
            end.after = block
        self._ends[pool] = block
        return block

    def _new(self, pool: _Key, size: int) -> Block:
        self._serial += 1
        return Block(pool, size, self._serial)

    def _split(self, block: Block, size: int) -> None:
        rest = self._new(block.pool, block.size - size)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = rest
        self._keep(rest)

    def _merged(self, first: Block, second: Block) -> Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if self._ends.get(first.pool) is second:
            self._ends[first.pool] = first
        return first

    def _keep(self, block: Block) -> None:
        block.is_free = True
        insort(self._free.setdefault(block.pool, []), (block.size, block.serial, block))

    def _take(self, block: Block) -> None:
        block.is_free = False
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.serial))]
