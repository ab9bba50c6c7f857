"""A switch for selective checkpointing (recompute.py): keep results, or recompute them."""

from __future__ import annotations  # exports are opened by older Pythons, too

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_KEEPS_NONE: ContextVar[bool] = ContextVar("_KEEPS_NONE", default=False)


@contextlib.contextmanager
def keeping_none() -> Iterator[None]:
    """Within this context, selective checkpointing keeps no results."""
    token = _KEEPS_NONE.set(True)
    try:
        yield
    finally:
        _KEEPS_NONE.reset(token)


def keeps_none() -> bool:
    """Return True within `keeping_none`."""
    return _KEEPS_NONE.get()
