"""Settings of torch's memory allocators, which a run on GPUs makes before it fills them."""

from __future__ import annotations

from typing import Any

import torch

from harness.layout.world import World

_SEGMENTS = "expandable_segments:True"
# Larger blocks of pinned host memory are then as large as asked for, and given back when freed; all
# others torch rounds up to powers of two, and keeps. pinned_max_round_threshold_mb would leave the
# caching on, and until torch PR 192722 a larger block may get the memory of a smaller one.
_PINNED = "pinned_max_cached_size_mb:64"


def set_allocators(world: World) -> dict[str, Any]:
    """Let segments of GPU memory grow, against fragments, and pinned host memory be as large as
    asked for, unless the user has set the allocators. Returns the event that says so.
    """
    if world.allocators is not None:
        return _event(f"{world.allocators} is the user's, and left as it is")
    for settings in (f"{_SEGMENTS},{_PINNED}", _SEGMENTS):
        try:
            torch._C._accelerator_setAllocatorSettings(settings)
        except (RuntimeError, ValueError, AttributeError):
            continue  # a torch that does not know a setting
        return _event(f"torch's allocators are set to {settings} (PYTORCH_ALLOC_CONF)")
    return _event("torch's allocators are as they were: this torch takes no settings")


def _event(message: str) -> dict[str, Any]:
    return {"kind": "allocators", "message": message}
