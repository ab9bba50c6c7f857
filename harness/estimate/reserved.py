"""A model of the memory that torch's caching allocator reserves on a rank's GPU.

A request is rounded up to 512 bytes and served from the smallest sufficient free block of its
stream; the rest becomes a separate block. If there is none, a segment is reserved: 2 MiB for
requests up to 1 MiB, 20 MiB below 10 MiB, else the request rounded up to 2 MiB. Free neighbours
within a segment merge, and segments are kept (c10/cuda/CUDACachingAllocator.cpp, torch 2.13). With
`expandable_segments` each stream has one segment that grows by pages.

The first step allocates the moments, possibly in blocks that activations have freed, so the second
step needs more. Layers come and go, each with temporaries whose holes are filled by its own
results. Memory from one of DeepSpeed's streams is never reused by another stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import BACKWARD, FP32, PHASES, MemoryItem
from harness.layout.recompute import is_checkpointed

_ROUND = 512
_SMALL = 2**20  # bytes; larger requests use another pool
_SMALL_SEGMENT = 2 * 2**20
_LARGE_SEGMENT = 20 * 2**20
_OWN_SEGMENT = 10 * 2**20  # requests from this size on get their own segment
_SEGMENT_ROUND = 2 * 2**20

_Key = tuple[str, bool]
"""A stream, and True for small requests."""


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment."""

    pool: _Key
    size: int
    serial: int
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


@dataclass
class Allocator:
    """The segments and blocks of one device; sizes in bytes."""

    expandable: bool = False
    reserved: int = 0
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
        block.is_free = False
        return block

    def free(self, block: Block) -> None:
        """Return a block to its stream, merged with free neighbours."""
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


_MICRO_BATCH = ("forward", "loss", "backward_first", "backward_last")
_BOUNDARY = ("reduce", "gradients_ready", "norm", "cast", "step", "between_steps")
_MOST_PIECES = 2_000
_LEAST_PIECE = 4_096  # bytes
_IN_LAYERS = (
    "mlp",
    "norms",
    "attention",
    "layers",
    "layer inputs",
    "kept results",
    "copies of attention",
)
_OF_A_LAYER = ("recomputed layer", "backward temporaries")

_Pieces = dict[str, Counter[int]]
"""Tensor sizes of each component, with their counts."""

WHOLE_MODEL = "whole model"
"""Weights before they are sharded: for ZeRO 3 without zero.Init, and for stages 1 and 2 until they
are copied into one flat buffer (stage_1_and_2.py)."""
_GATHERED = frozenset({"gathered parameters", "prefetch copy"})
"""Allocated on ZeRO 3's gather stream (partitioned_param_coordinator.py)."""
_REDUCED = frozenset({"communication copy"})
"""Allocated on the reduction stream, if reductions overlap the backward pass."""
_OFFLOADED = _REDUCED | {"norm in fp64", "gradients"}
"""The same for ZeRO 2 with an offloaded optimizer."""


def reserved_bytes(inputs: Inputs, parts: Iterable[MemoryItem], expandable: bool) -> int:
    """Return the maximum bytes reserved over a run's first two steps."""
    parts = [part for part in parts if part.place == "device"]
    if inputs.zero.stage in (1, 2) and inputs.grid.pipeline == 1:
        size = inputs.element_bytes * inputs.trained
        parts.append(MemoryItem(WHOLE_MODEL, size, frozenset({"build"}), "read"))
    if inputs.zero.stage in (1, 2) and inputs.zero.overlap_comm and inputs.shards > 1:
        # Copied into a bucket, but not reusable until the other stream has passed (record_stream).
        size = inputs.element_bytes * min(inputs.zero.reduce_bucket, inputs.trained)
        parts.append(MemoryItem("gradients on their way", size, BACKWARD, "read"))
    return _Tape(inputs, parts, expandable).played()


class _Tape:
    """Replays the allocations of a rank, phase by phase."""

    def __init__(self, inputs: Inputs, parts: list[MemoryItem], expandable: bool) -> None:
        self._inputs = inputs
        self._units = _units(inputs)
        self._numels = [tensor.numel for tensor in inputs.trained_tensors]
        self._allocator = Allocator(expandable)
        self._blocks: dict[tuple[str, int], list[Block]] = {}
        self._layers: list[list[Block]] = []
        self._now: _Pieces = {}
        layered = {f"activations: {name}" for name in _IN_LAYERS}
        self._layer = self._one_layer([p for p in parts if p.component in layered])
        self._again = self._one_layer(
            [p for p in parts if p.component in _OF_A_LAYER and "backward_first" in p.phases], 1
        )
        others = [p for p in parts if p.component not in layered]
        self._of_phase = {name: self._pieces(others, name) for name in PHASES}
        self._late = {
            part.component
            for part in parts
            if part.component == "moments" and "built" not in part.phases
        }

    def played(self) -> int:
        """Return the bytes reserved after the replay."""
        self._reach("build")
        self._reach("built")
        for step in (1, 2):
            for _ in range(min(2, self._inputs.grad_accum)):
                for name in _MICRO_BATCH:
                    self._reach(name, self._late if step == 1 else ())
            for name in _BOUNDARY:
                early = step == 1 and name not in ("step", "between_steps")
                self._reach(name, self._late if early else ())
        self._reach("evaluation")
        return self._allocator.reserved

    def _reach(self, phase: str, missing: Collection[str] = ()) -> None:
        """Free what the phase does not need, then allocate what it adds."""
        if phase == "backward_last":
            self._leave_layers()
        phases = self._of_phase[phase].items()
        there = {name: sizes for name, sizes in phases if name not in missing}
        for name in [*self._now]:
            gone = self._now[name] - there.get(name, Counter())
            for size, count in gone.items():
                blocks = self._blocks[name, size]
                for _ in range(count):
                    self._allocator.free(blocks.pop())
        if phase == "reduce":
            self._drop_layers(0)
        for name, sizes in there.items():
            new = sizes - self._now.get(name, Counter())
            for size, count in new.items():
                blocks = self._blocks.setdefault((name, size), [])
                for _ in range(count):
                    blocks.append(self._allocator.allocate(size, self._stream(name)))
        self._now = there
        if phase == "forward":
            self._enter_layers()

    def _enter_layers(self) -> None:
        """Run the layers forward: allocate temporaries, results among them, free temporaries."""
        self._drop_layers(0)
        run, temporaries = self._inputs, self._units["forward temporaries"]
        for index in range(run.shape.num_layers * run.in_flight):
            layer = run.first_layer + index % run.shape.num_layers
            between = temporaries if is_checkpointed(run.checkpointing, layer) else ()
            blocks = [self._allocator.allocate(size) for size in between if size]
            self._layers.append([self._allocator.allocate(size) for size in self._layer])
            for block in blocks:
                self._allocator.free(block)

    def _leave_layers(self) -> None:
        """Run the layers backward, down to the first.

        Once a layer's temporaries reserve nothing new, they fit for all following layers too.
        """
        fits = False
        while len(self._layers) > 1:
            if not fits:
                before = self._allocator.reserved
                blocks = [self._allocator.allocate(size) for size in self._again]
                for block in blocks:
                    self._allocator.free(block)
                fits = self._allocator.reserved == before
            self._drop_layers(len(self._layers) - 1)

    def _drop_layers(self, count: int) -> None:
        while len(self._layers) > count:
            for block in self._layers.pop():
                self._allocator.free(block)

    def _one_layer(self, parts: Iterable[MemoryItem], count: int = 0) -> list[int]:
        """Return the tensor sizes of one layer, given the `parts` of all layers together."""
        layers = count or max(1, self._inputs.shape.num_layers * self._inputs.in_flight)
        kept = [p for p in parts if "loss" in p.phases or "backward_first" in p.phases]
        return [size for p in kept for size in self._cut(p.component, p.bytes // layers) if size]

    def _stream(self, component: str) -> str:
        zero = self._inputs.zero
        if not zero.overlap_comm:
            return ""
        if component in _GATHERED:
            return "gathers"
        offloads = zero.stage == 2 and zero.offload_optimizer != "device"
        return "reductions" if component in (_OFFLOADED if offloads else _REDUCED) else ""

    def _pieces(self, parts: Iterable[MemoryItem], phase: str) -> _Pieces:
        pieces: _Pieces = {}
        for part in parts:
            if phase in part.phases and part.bytes:
                sizes = pieces.setdefault(part.component, Counter())
                sizes.update(self._cut(part.component, part.bytes))
        return pieces

    def _cut(self, component: str, size: int) -> Iterator[int]:
        """Yield tensor sizes that add up to `size` bytes."""
        by_tensor = component == WHOLE_MODEL
        if by_tensor or (component == "gradients" and self._inputs.zero.stage < 3):
            each = size / max(1, sum(self._numels))
            yield from (max(_LEAST_PIECE, int(each * numel)) for numel in self._numels)
            return
        units = self._units.get(component, (size,))
        smallest = max(_LEAST_PIECE, size // _MOST_PIECES)
        while size > 0:
            for unit in units:
                piece = min(max(unit, smallest), size)
                if piece > 0:
                    yield piece
                size -= piece


def _units(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Return the tensor sizes that make up each component, repeated in this order."""
    shape, e, tokens = inputs.shape, inputs.element_bytes, inputs.tokens
    stream, queries = e * shape.hidden_size * tokens, e * shape.q_size * tokens
    width = max(shape.intermediate_size, shape.expert_size * shape.experts_per_token)
    wide = e * width * -(-tokens // inputs.mlp_tiles)
    chunk = min(inputs.chunk or shape.vocab_size, shape.vocab_size)
    fp32_stream = FP32 * shape.hidden_size * tokens
    largest = max((max(t.numel for t in layer) for layer in shape.body.layers), default=1)
    return {
        "activations: mlp": (wide,),
        "activations: norms": (fp32_stream, stream, stream),
        "activations: attention": (queries,),
        "activations: layers": (stream,),
        "activations: layer inputs": (stream,),
        "activations: kept results": (queries, wide),
        "activations: head": (fp32_stream, stream),
        "recomputed layer": (wide, wide, wide, fp32_stream, stream, queries),
        "backward temporaries": (wide,),
        # Gate's activation, up and product, and the residual stream before and after the MLP.
        "forward temporaries": (stream, wide, wide, wide, stream),
        "MLP tile": (wide,),
        "logits and loss": (FP32 * chunk * tokens,),
        "gathered parameters": (e * largest,),
        "prefetch copy": (e * largest,),
    }
