"""Bytes that live tensors occupy in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


def live_storages() -> dict[int, tuple[torch.UntypedStorage, torch.dtype]]:
    """Every storage that a Python tensor, or a leaf's gradient, refers to: by id, with its dtype.

    Tensors on meta hold nothing. What only C++ refers to (saved activations) is not seen, so this
    is exact between phases, not inside of them. The result keeps the storages alive: as long as it
    is there, no other can get the id of one of them.
    """
    gc.collect()
    found: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}
    for tensor in _tensors():
        if tensor.device.type == "meta":
            continue
        storage = tensor.untyped_storage()
        found[storage._cdata] = (storage, tensor.dtype)
    return found


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad


@dataclass
class Rise:
    """How far allocated bytes rose above where they began."""

    bytes: int = 0


@contextmanager
def rise() -> Iterator[Rise]:
    """Follow every allocation of the CPU's allocator, that of C++ too, while the body runs."""
    found = Rise()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    now = 0
    for _, size in changes:
        now += size
        found.bytes = max(found.bytes, now)
