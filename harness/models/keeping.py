"""Whether selective checkpointing (recompute.py) keeps the results of what is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_KEEPS_NONE: ContextVar[bool] = ContextVar("_KEEPS_NONE", default=False)


@contextlib.contextmanager
def keeping_none() -> Iterator[None]:
    """Within this, no result is kept: it is recomputed by other means."""
    token = _KEEPS_NONE.set(True)
    try:
        yield
    finally:
        _KEEPS_NONE.reset(token)


def keeps_none() -> bool:
    """Return whether this is within `keeping_none`."""
    return _KEEPS_NONE.get()
