"""An attribute that has another value for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace `owner.name` within this."""
    own = {name: vars(owner)[name]} if name in vars(owner) else {}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(own)
