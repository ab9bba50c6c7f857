"""Settings of the memory allocators (torch's and glibc's), made before a run allocates."""

import ctypes
import os
from typing import Any

import torch

from harness.layout.world import World

_SEGMENTS = "expandable_segments:True"
# Makes larger blocks of pinned host memory exactly as large as requested and returns them when
# freed; torch rounds all others up to powers of two and caches them. pinned_max_round_threshold_mb
# would leave the caching on, and until torch PR 192722 a larger block may get the memory of a
# smaller one.
_PINNED = "pinned_max_cached_size_mb:64"
MALLOC_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": "",
    "MALLOC_TRIM_THRESHOLD_": "",
    "GLIBC_TUNABLES": "glibc.malloc.",
    "LD_PRELOAD": "malloc",
}
"""Environment variables that configure or replace malloc if their value contains the given text."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt (malloc.h)
_NEVER = -1
# Block size in bytes from which glibc maps each block separately and unmaps it when freed. The
# largest int, because ZeRO 1 allocates buckets of 2 GB in every step; glibc before 2.35 accepts at
# most half of a thread's heap.
LARGEST_BLOCKS = (2**31 - 1, 2**25)


def set_allocators(world: World) -> dict[str, Any]:
    """Configure the memory allocators, unless the user has. Return the event that reports it."""
    if world.accelerator == "cpu":
        return _event(_keep_freed_pages())
    if world.allocators is not None:
        return _event(f"{world.allocators} is set by the user and left unchanged")
    for settings in (f"{_SEGMENTS},{_PINNED}", _SEGMENTS):
        try:
            torch._C._accelerator_setAllocatorSettings(settings)
        except (RuntimeError, ValueError, AttributeError):
            continue  # this torch does not know a setting
        return _event(f"torch's allocators are set to {settings} (PYTORCH_ALLOC_CONF)")
    return _event("torch's allocators are unchanged: this torch version has no settings")


def _keep_freed_pages() -> str:
    """Make glibc keep freed memory, as torch's GPU allocator does; return a message about it.

    The kernel would clear and map it again in the next step: up to a quarter of a small step's
    time ("freed pages kept" in docs/evidence.md).
    """
    for name, part in MALLOC_VARIABLES.items():
        value = os.environ.get(name)
        if value and part in value:
            return f"malloc is unchanged: {name}={value} is set by the user"
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return "malloc is unchanged: this C library has no settings"
    # Setting only the trim threshold would fix the mmap threshold at 128 KiB.
    if any(set_option(_MMAP_THRESHOLD, size) for size in LARGEST_BLOCKS):
        set_option(_TRIM_THRESHOLD, _NEVER)
        return "malloc keeps freed memory for the next step (MALLOC_TRIM_THRESHOLD_)"
    return "malloc is unchanged: it accepts no settings"


def _event(message: str) -> dict[str, Any]:
    return {"kind": "allocators", "message": message}
