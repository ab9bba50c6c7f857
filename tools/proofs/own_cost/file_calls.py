"""Calls that reach a file system, counted by the thread that makes them."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

# All of these ask the file system for names or attributes; what is read and written comes after.
_OF_OS = ("stat", "lstat", "open", "listdir", "scandir", "mkdir", "rmdir", "unlink", "remove",
          "rename", "replace", "fsync", "ftruncate")  # fmt: skip


@contextlib.contextmanager
def counted_calls() -> Iterator[Counter[int]]:
    """Count by thread (`threading.get_ident()`) within the block.

    Calls of Python code are seen, not those that C code makes by itself.
    """
    calls: Counter[int] = Counter()

    def counting(call: Any) -> Any:
        def counts(*arguments: Any, **named: Any) -> Any:
            calls[threading.get_ident()] += 1
            return call(*arguments, **named)

        return counts

    with contextlib.ExitStack() as patches:
        for name in _OF_OS:
            patches.enter_context(mock.patch.object(os, name, counting(getattr(os, name))))
        patches.enter_context(mock.patch.object(io, "open", counting(io.open)))
        yield calls
