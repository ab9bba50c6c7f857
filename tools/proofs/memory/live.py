"""Measures the rise of allocated bytes while a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Rise:
    """Rise of allocated bytes above their start."""

    bytes: int = 0


@contextmanager
def rise() -> Iterator[Rise]:
    """Follow every allocation of the CPU's allocator, that of C++ too, while the body runs."""
    highest = Rise()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield highest
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    now = 0
    for _, size in changes:
        now += size
        highest.bytes = max(highest.bytes, now)
