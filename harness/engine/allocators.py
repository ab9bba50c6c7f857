"""Settings of memory allocators, which a run makes before it fills them: torch's, glibc's."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from harness.layout.world import World

_SEGMENTS = "expandable_segments:True"
# Larger blocks of pinned host memory are then as large as asked for, and given back when freed; all
# others torch rounds up to powers of two, and keeps. pinned_max_round_threshold_mb would leave the
# caching on, and until torch PR 192722 a larger block may get the memory of a smaller one.
_PINNED = "pinned_max_cached_size_mb:64"
MALLOC_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": "",
    "MALLOC_TRIM_THRESHOLD_": "",
    "GLIBC_TUNABLES": "glibc.malloc.",
    "LD_PRELOAD": "malloc",
}
"""Of the environment: those that set malloc, or replace it, where their value contains a text."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt: malloc.h
_NEVER = -1
# Bytes from which glibc maps a block by itself, and unmaps it when freed: the most that an int
# holds, as ZeRO 1 makes buckets of 2 GB in every step. Before 2.35 it takes no more than half of a
# thread's heap.
LARGEST_BLOCKS = (2**31 - 1, 2**25)


def set_allocators(world: World) -> dict[str, Any]:
    """On GPUs, let segments of their memory grow, against fragments, and pinned host memory be as
    large as asked for; on a CPU, keep what is freed. What the user has set is left alone. Returns
    the event that says so.
    """
    if world.accelerator == "cpu":
        return _event(_keep_freed_pages())
    if world.allocators is not None:
        return _event(f"{world.allocators} is the user's, and left as it is")
    for settings in (f"{_SEGMENTS},{_PINNED}", _SEGMENTS):
        try:
            torch._C._accelerator_setAllocatorSettings(settings)
        except (RuntimeError, ValueError, AttributeError):
            continue  # a torch that does not know a setting
        return _event(f"torch's allocators are set to {settings} (PYTORCH_ALLOC_CONF)")
    return _event("torch's allocators are as they were: this torch takes no settings")


def _keep_freed_pages() -> str:
    """Have glibc keep what is freed, as torch's allocator of a GPU does; returns a line on it.

    Otherwise it returns to the kernel most of what a step frees, and the kernel clears and maps
    these pages again in the next step: up to a quarter of a small step's time ("freed pages kept"
    in docs/evidence.md).
    """
    for name, part in MALLOC_VARIABLES.items():
        value = os.environ.get(name)
        if value and part in value:
            return f"{name}={value} is the user's, and malloc left as it is"
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library's
        return "malloc is as it was: this C library takes no settings"
    # Setting the threshold of trimming alone would leave that of blocks at 128 KiB for good.
    if any(set_option(_MMAP_THRESHOLD, size) for size in LARGEST_BLOCKS):
        set_option(_TRIM_THRESHOLD, _NEVER)
        return "malloc keeps what a step frees, for the next (MALLOC_TRIM_THRESHOLD_)"
    return "malloc is as it was: it takes no settings"


def _event(message: str) -> dict[str, Any]:
    return {"kind": "allocators", "message": message}
