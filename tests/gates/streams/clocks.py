"""Streams, events and the host: each knows by a vector clock which operations have ended before."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from tests.gates.streams.report import place

Clock = Counter[int]  # stream -> the last of its operations known to have ended
HOST = -1  # a number that no stream has


class Timeline:
    """All streams of a device, and the host that launches on them.

    `waits`: of the host, by (phase, file:line, kind).
    """

    def __init__(self) -> None:
        self.streams = list[Stream]()
        self.host: Clock = Counter()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.phase = ""
        self._numbers = itertools.count()
        self.default, self.network = Stream(self), Stream(self)
        self._entered = [self.default]

    def add(self, stream: Stream) -> int:
        """Take in a stream; returns its number."""
        self.streams.append(stream)
        return next(self._numbers)

    @property
    def current(self) -> Stream:
        """The stream that operations are launched on."""
        return self._entered[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Launch on `stream` within."""
        self._entered.append(stream or self.current)
        try:
            yield
        finally:
            self._entered.pop()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count waits under the name of a phase within."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    def launched(self) -> Clock:
        """Launch an operation on the current stream: it comes after all that the host has waited
        for.
        """
        stream = self.current
        stream.clock |= self.host
        stream.clock[stream.number] += 1
        return stream.clock

    def host_waits(self, clock: Clock, kind: str) -> None:
        """Let the host wait for all that is in `clock`."""
        self.host |= clock
        self.waits[self.phase, place(), kind] += 1

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
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
        """Let what is launched here from now on come after what `other` has."""
        self.clock |= other.clock

    def wait_event(self, event: Event) -> None:
        """Let what is launched here from now on come after an event."""
        self.clock |= event.clock

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event after all that this stream has."""
        event = event or Event(self.timeline)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait."""
        self.timeline.host_waits(self.clock, "stream")

    def query(self) -> bool:
        """Return False: it may always have work."""
        return False


class Event:
    """The work that a stream had when it was recorded."""

    def __init__(self, timeline: Timeline, **_options: Any) -> None:
        self.timeline, self.clock = timeline, Counter[int]()

    def record(self, stream: Stream | None = None) -> None:
        """Take all that a stream has."""
        self.clock = Counter((stream or self.timeline.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for it."""
        (stream or self.timeline.current).clock |= self.clock

    def synchronize(self) -> None:
        """Let the host wait."""
        self.timeline.host_waits(self.clock, "event")

    def query(self) -> bool:
        """Return False: nobody may count on its end."""
        return False

    def elapsed_time(self, _other: Event) -> float:
        """Return no time: none passes here."""
        return 0.0


class Work:
    """A collective on its way, which keeps its tensors until somebody has waited for it, as NCCL's
    does: who waits, waits on the stream that is current then.
    """

    def __init__(self, work: Any, timeline: Timeline, tensors: Any) -> None:
        self._work, self._timeline, self._tensors = work, timeline, tensors
        self._clock = Counter(timeline.network.clock)

    def wait(self, *timeout: Any) -> Any:
        """Let the current stream wait."""
        self._timeline.current.clock |= self._clock
        self._tensors = None
        with _disable_current_modes():  # gloo copies out of buffers of its own, NCCL has none
            return self._work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
