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
def rise(mapped: int = 0) -> Iterator[Rise]:
    """Follow every allocation of the CPU's allocator, that of C++ too, while the body runs.

    `mapped`: bytes of a file whose mappings are left out. Safetensors maps the whole file for each
    tensor it reads; its pages are the kernel's, which drops them where memory is short.
    """
    highest = Rise()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield highest
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and abs(event.nbytes()) != mapped
    )
    now = 0
    for _, size in changes:
        now += size
        highest.bytes = max(highest.bytes, now)
