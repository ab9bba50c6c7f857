"""A device with streams, simulated by vector clocks: finds races and early reuse."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.launch.ranks import REPOSITORY

_OWNERS = ("deepspeed/", "transformers/", "harness/", "tests/", "tools/")
_PASSED_THROUGH = (
    *("tests/gates/streams/", "deepspeed/comm/", "deepspeed/utils/nvtx"),
    "deepspeed/utils/timer",
)


def place() -> str:
    """Return file:line of the innermost frame in one of the owners' files."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if name := _owned(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


_AUTOGRAD = "/torch/autograd/graph.py"  # it runs the kernels of the backward pass
_OF_MODEL = (
    *("transformers/", "harness/models/", "harness/engine/forward.py"),
    "deepspeed/runtime/zero/linear.py",
)


def is_of_model() -> bool:
    """Return True if the innermost frame that tells is of the model or its backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if name := _owned(file):
            return name.startswith(_OF_MODEL)
        if file.endswith(_AUTOGRAD):
            return True
        frame = frame.f_back
    return False


def is_within(part: str, frames: int = 16) -> bool:
    """Return True if the path of one of the innermost frames contains `part`."""
    frame = sys._getframe(1)
    for _ in range(frames):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if part in frame.f_code.co_filename:
            return True
    return False


@functools.cache
def _owned(file: str) -> str:
    """Return a file's path in its package; "" if it belongs to no owner."""
    _, installed, inside = file.rpartition("/site-packages/")
    if not installed:
        inside = file.removeprefix(f"{REPOSITORY}/")
    owned = inside.startswith(_OWNERS) and not inside.startswith(_PASSED_THROUGH)
    return inside if owned else ""


Clock = Counter[int]  # stream -> its last operation known to have ended
HOST = -1  # a number that no stream has


class Timeline:
    """All streams of a device, and the host that launches on them.

    `waits` counts the host's waits by (phase, file:line, kind); `launches` and `moved` count, by
    phase, the kernels that are not the model's and the bytes that they read and write.
    """

    def __init__(self) -> None:
        self.streams = list[Stream]()
        self.host: Clock = Counter()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.launches: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.phase = ""
        self._numbers = itertools.count()
        self.default, self.network = Stream(self), Stream(self)
        self._entered = [self.default]

    def add(self, stream: Stream) -> int:
        """Add a stream; return its number."""
        self.streams.append(stream)
        return next(self._numbers)

    @property
    def current(self) -> Stream:
        """The stream on which operations are launched."""
        return self._entered[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Launch on `stream` in the body."""
        self._entered.append(stream or self.current)
        try:
            yield
        finally:
            self._entered.pop()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count waits in the body under the name of a phase."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    def launched(self) -> Clock:
        """Launch an operation on the current stream, after all that the host waited for."""
        stream = self.current
        stream.clock |= self.host
        stream.clock[stream.number] += 1
        return stream.clock

    def count(self, moved: int) -> None:
        """Count a kernel and the bytes that it moves, unless it is the model's own."""
        if not is_of_model():
            self.launches[self.phase] += 1
            self.moved[self.phase] += moved

    def host_waits(self, clock: Clock, kind: str) -> None:
        """Make the host wait for everything in `clock`."""
        self.host |= clock
        self.waits[self.phase, place(), kind] += 1

    def synchronize(self) -> None:
        """Make the host wait for all streams."""
        everything: Clock = Counter()
        for stream in self.streams:
            everything |= stream.clock
        self.host_waits(everything, "device")


class Stream:
    """A queue of operations."""

    def __init__(self, timeline: Timeline, **_options: Any) -> None:
        self.timeline, self.clock = timeline, Counter[int]()
        self.number = timeline.add(self)

    def wait_stream(self, other: Stream) -> None:
        """Order later operations of this stream after all current ones of `other`."""
        self.clock |= other.clock

    def wait_event(self, event: Event) -> None:
        """Order later operations of this stream after an event."""
        self.clock |= event.clock

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event after all current operations of this stream."""
        event = event or Event(self.timeline)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for this stream."""
        self.timeline.host_waits(self.clock, "stream")

    def query(self) -> bool:
        """Return False: it may always have work."""
        return False


class Event:
    """The operations that a stream had when the event was recorded."""

    def __init__(self, timeline: Timeline, **_options: Any) -> None:
        self.timeline, self.clock = timeline, Counter[int]()

    def record(self, stream: Stream | None = None) -> None:
        """Record all current operations of a stream."""
        self.clock = Counter((stream or self.timeline.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for the event."""
        (stream or self.timeline.current).clock |= self.clock

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        self.timeline.host_waits(self.clock, "event")

    def query(self) -> bool:
        """Return False: nobody may rely on its end."""
        return False

    def elapsed_time(self, _other: Event) -> float:
        """Return 0: no time passes here."""
        return 0.0


class Work:
    """A collective in progress, which keeps its tensors until a stream has waited for it."""

    def __init__(self, work: Any, timeline: Timeline, tensors: Any) -> None:
        self._work, self._timeline, self._tensors = work, timeline, tensors
        self._clock = Counter(timeline.network.clock)

    def wait(self, *timeout: Any) -> Any:
        """Make the current stream wait for the collective."""
        self._timeline.current.clock |= self._clock
        self._tensors = None
        with _disable_current_modes():  # gloo copies out of its own buffers; NCCL has none
            return self._work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


# Tensors that harness/data creates are on the host, although torch gives both the same device.
_ON_HOST = "harness/data/"
Touched = Sequence[tuple[torch.Tensor, bool]]  # True if written


@dataclass(frozen=True)
class Access:
    """One operation's read or write of bytes [begin, end) of a storage."""

    begin: int
    end: int
    writes: bool
    stream: int
    time: int  # on that stream
    where: str

    def conflicts(self, other: Access) -> bool:
        """Return True if both touch a byte that one of them writes."""
        return self.begin < other.end and other.begin < self.end and (self.writes or other.writes)

    def covers(self, other: Access) -> bool:
        """Return True if an order after self implies an order after `other`."""
        return (
            self.begin <= other.begin
            and other.end <= self.end
            and (self.writes or (not other.writes and self.stream == other.stream))
        )


@dataclass
class Block:
    """A storage: its kind of memory, the stream that allocated it, and its last accesses."""

    kind: Literal["device", "pinned", "pageable"]
    owner: int
    alive: weakref.ref[Any] | None = None
    accesses: list[Access] = field(default_factory=list)
    recorded: list[Stream] = field(default_factory=list)
    """Streams that the allocator waits for after record_stream."""


class Memory:
    """Every storage, tracked by the operations on it.

    A storage that no operation created belongs to the host. `races`: conflicting accesses without
    an order, as "first place -> second place". `reuses`: blocks freed while another stream could
    still use them, as "last use -> new owner of the block".
    """

    def __init__(self, timeline: Timeline) -> None:
        self.races: Counter[str] = Counter()
        self.reuses: Counter[str] = Counter()
        self._timeline = timeline
        self._blocks: dict[int, Block] = {}
        self._freed: dict[int, list[Block]] = defaultdict(list)  # by the stream that receives them

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is in host memory."""
        return self._block(tensor).kind != "device"

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is in page-locked memory."""
        return self._block(tensor).kind == "pinned"

    def mark(self, tensor: torch.Tensor, kind: Literal["device", "pinned", "pageable"]) -> None:
        """Move a tensor to another kind of memory, as if it were a finished copy."""
        block = self._block(tensor)
        block.kind, block.accesses = kind, []

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep a freed block from reuse before `stream` has finished its operations."""
        self._block(tensor).recorded.append(stream)

    def run(self, touched: Touched, made: Sequence[torch.Tensor], is_copy: bool = False) -> bool:
        """Record one operation; return True if the host does it itself on its own memory.

        `made` are its results, which are in the same memory as its inputs. A copy between both
        memories runs on the device; other operations read host memory when they are launched.
        """
        here = [(tensor, writes) for tensor, writes in touched if tensor.device.type == "cpu"]
        on_host = bool(here) and all(self.is_host(tensor) for tensor, _ in here)
        timeline, where = self._timeline, place()
        clock = timeline.host if on_host else timeline.launched()
        stays = on_host or (not here and where.startswith(_ON_HOST))
        for tensor in made:
            if tensor.device.type == "cpu" and not self._knows(tensor):
                self._allocate(tensor, "pageable" if stays else "device")
        written = [(tensor, True) for tensor in made if tensor.device.type == "cpu"]
        for tensor, writes in (*here, *written):
            if on_host or (not is_copy and self.is_host(tensor)):
                self._access(tensor, writes, HOST, timeline.host, where)
            else:
                self._access(tensor, writes, timeline.current.number, clock, where)
        return on_host

    def _knows(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._blocks

    def _block(self, tensor: torch.Tensor) -> Block:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        timeline = self._timeline
        is_buffer = timeline.current is timeline.network  # one of gloo's own
        return block or self._add(storage, Block("device" if is_buffer else "pageable", HOST))

    def _allocate(self, tensor: torch.Tensor, kind: Literal["device", "pageable"]) -> None:
        stream = self._timeline.current
        if kind == "device" and (freed := self._freed.pop(stream.number, None)):
            where = place()
            clock = stream.clock | self._timeline.host
            for block in freed:
                for access in block.accesses:
                    if access.stream != stream.number and clock[access.stream] < access.time:
                        self.reuses[f"{access.where} -> {where}"] += 1
        self._add(tensor.untyped_storage(), Block(kind, stream.number))

    def _add(self, storage: Any, block: Block) -> Block:
        identity = storage._cdata
        block.alive = weakref.ref(storage, partial(self._died, identity))
        self._blocks[identity] = block
        return block

    def _died(self, identity: int, _reference: Any) -> None:
        block = self._blocks.pop(identity, None)
        if block is None or block.kind != "device":
            return
        ended: Clock = Counter()
        for stream in block.recorded:
            ended |= stream.clock
        block.accesses = [a for a in block.accesses if ended[a.stream] < a.time]
        if any(access.stream != block.owner for access in block.accesses):
            self._freed[block.owner].append(block)

    def _access(
        self, tensor: torch.Tensor, writes: bool, number: int, clock: Clock, where: str
    ) -> None:
        if not tensor.numel():
            return
        block, size = self._block(tensor), tensor.element_size()
        if number == HOST and block.kind == "device":
            return
        begin = tensor.storage_offset()
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        last = begin + sum((count - 1) * stride for count, stride in strides)
        new = Access(begin * size, (last + 1) * size, writes, number, clock[number], where)
        for old in block.accesses:
            if old.stream != number and clock[old.stream] < old.time and new.conflicts(old):
                self.races[f"{old.where} -> {where}"] += 1
        if number != HOST:  # later launches come after the host's own accesses
            later = [a for a in block.accesses if clock[a.stream] < a.time or not new.covers(a)]
            block.accesses[:] = [*later, new]
