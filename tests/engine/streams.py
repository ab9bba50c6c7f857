"""A device with streams, simulated: who has waited for whom, and which accesses race.

Streams and events carry vector clocks. Two accesses to the same bytes, one of them a write, of
which neither happens before the other, are a race. Pinned memory is the host's: operations on it
run on the processor, at once. `simulated_device.py` puts real engines on it.

Not seen: memory reused without record_stream, what NCCL does, Triton kernels, copies from pageable
memory.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Clock = Counter[int]  # stream -> the last of its operations known to have ended
REPOSITORY = str(Path(__file__).resolve().parents[2])
OURS = ("deepspeed/", "transformers/", "harness/", "tests/")
PASSED_THROUGH = (
    *("tests/engine/streams.py", "tests/engine/simulated_device.py"),
    *("deepspeed/comm/", "deepspeed/utils/nvtx", "deepspeed/utils/timer"),
)


def _learn(clock: Clock, other: Clock) -> None:
    """Bring `clock` up to `other`, stream by stream."""
    clock |= other


class Stream:
    """A queue of operations."""

    def __init__(self, device: Device, **_options: Any) -> None:
        self.device, self.number, self.clock = device, next(device.numbers), Counter[int]()
        device.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        _learn(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        _learn(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.device.host_waits(self.clock)

    def query(self) -> bool:
        return False


class Event:
    """What a stream had done when it was recorded."""

    def __init__(self, device: Device, **_options: Any) -> None:
        self.device, self.clock = device, Counter[int]()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Counter((stream or self.device.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        _learn((stream or self.device.current).clock, self.clock)

    def synchronize(self) -> None:
        self.device.host_waits(self.clock)

    def query(self) -> bool:
        return False

    def elapsed_time(self, _other: Event) -> float:
        return 0.0


class Work:
    """A collective on its way: who waits for it waits on the stream that is current then."""

    def __init__(self, work: Any, device: Device) -> None:
        self.work, self.device, self.clock = work, device, Counter(device.network.clock)

    def wait(self, *timeout: Any) -> Any:
        _learn(self.device.current.clock, self.clock)
        return self.work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@dataclass(frozen=True)
class Access:
    """One operation's reading or writing of bytes [begin, end) of a storage."""

    begin: int
    end: int
    writes: bool
    stream: int
    time: int  # on that stream
    where: str

    def conflicts(self, other: Access) -> bool:
        """Whether both touch a byte that one of them writes."""
        return self.begin < other.end and other.begin < self.end and (self.writes or other.writes)

    def covers(self, other: Access) -> bool:
        """Whether whoever is ordered after self is ordered after `other`, if self is."""
        return (
            self.begin <= other.begin
            and other.end <= self.end
            and (self.writes or (not other.writes and self.stream == other.stream))
        )


class Device:
    """Streams, what they have accessed, and what was seen: `races` and `waits`, by file:line."""

    HOST = -1

    def __init__(self) -> None:
        self.numbers, self.streams = itertools.count(), list[Stream]()
        self.host: Clock = Counter()
        self.default, self.network = Stream(self), Stream(self)
        self.entered = [self.default]
        self.races: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.pinned: dict[int, Any] = {}
        self._memory: dict[int, tuple[Any, list[Access]]] = {}  # keeps storages: ids stay theirs

    @property
    def current(self) -> Stream:
        """The stream that operations are launched on."""
        return self.entered[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Launch on `stream` within."""
        self.entered.append(stream or self.current)
        try:
            yield
        finally:
            self.entered.pop()

    def host_waits(self, clock: Clock) -> None:
        """Let the host wait for all that is in `clock`."""
        _learn(self.host, clock)
        self.waits[_where()] += 1

    def synchronize(self, _index: Any = None) -> None:
        """Let the host wait for all streams."""
        for stream in self.streams:
            _learn(self.host, stream.clock)
        self.waits[_where()] += 1

    def pin(self, tensor: torch.Tensor, *_alignment: Any) -> torch.Tensor:
        """Make this memory the host's."""
        storage = tensor.untyped_storage()
        self.pinned[storage._cdata] = storage
        return tensor

    def run(self, name: str, tensors: list[tuple[torch.Tensor, bool]], waits: bool = False) -> None:
        """Note one operation on (tensor, whether it is written).

        `waits`: the host waits for it where it is a copy to or from pinned memory.
        """
        stream, where = self.current, _where()
        copies = name in ("aten::copy_", "aten::_to_copy")
        touches_host = any(t.untyped_storage()._cdata in self.pinned for t, _ in tensors)
        if touches_host and not copies:
            for tensor, writes in tensors:
                self._access(tensor, writes, self.HOST, self.host, where)
            return
        _learn(stream.clock, self.host)  # it is launched after all that the host waited for
        stream.clock[stream.number] += 1
        for tensor, writes in tensors:
            self._access(tensor, writes, stream.number, stream.clock, where)
        if touches_host and waits:
            _learn(self.host, stream.clock)

    def _access(
        self, tensor: torch.Tensor, writes: bool, number: int, clock: Clock, where: str
    ) -> None:
        if not tensor.numel() or tensor.device.type != "cpu":
            return
        storage, size = tensor.untyped_storage(), tensor.element_size()
        if number == self.HOST and storage._cdata not in self.pinned:
            return
        begin = tensor.storage_offset()
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        last = begin + sum((count - 1) * stride for count, stride in strides)
        new = Access(begin * size, (last + 1) * size, writes, number, clock[number], where)
        _, accesses = self._memory.setdefault(storage._cdata, (storage, []))
        for old in accesses:
            if old.stream != number and clock[old.stream] < old.time and new.conflicts(old):
                self.races[f"{old.where} -> {where}"] += 1
        if number != self.HOST:  # what is launched later comes after the host's own accesses
            later = [a for a in accesses if clock[a.stream] < a.time or not new.covers(a)]
            accesses[:] = [*later, new]


def frames() -> Iterator[tuple[str, int]]:
    """(file, line) of the callers, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _where() -> str:
    """file:line of the innermost line of the harness's or of DeepSpeed's that leads here."""
    for file, line in frames():
        _, installed, inside = file.rpartition("/site-packages/")
        if not installed:
            inside = file.removeprefix(f"{REPOSITORY}/")
        if inside.startswith(OURS) and not inside.startswith(PASSED_THROUGH):
            return f"{inside}:{line}"
    return "?"
