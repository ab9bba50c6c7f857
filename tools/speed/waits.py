"""Waits of the host for a CUDA device, by the line that waits."""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
WARNING = "called a synchronizing CUDA operation"  # c10/cuda/CUDAFunctions.cpp
_INSIDE = (f"{Path(torch.__file__).parent}/", contextlib.__file__, warnings.__file__, __file__)
"""Begins of the paths of frames that are no call sites: torch's own, by where it is installed."""
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_EXPLICIT = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
)
"""Waits that torch's own mode says nothing of."""


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count the waits of the body: "harness/run/meter.py:59" -> times. Slows it down."""
    places: Counter[str] = Counter()

    def warned(message: Any, *_: Any, **__: Any) -> None:
        if WARNING in str(message):
            places[call_site(traceback.extract_stack())] += 1

    before = torch.cuda.get_sync_debug_mode()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        stack.enter_context(mock.patch.object(warnings, "showwarning", warned))
        for owner, name in _EXPLICIT:
            counted = _counted(getattr(owner, name), places)
            stack.enter_context(mock.patch.object(owner, name, counted))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _counted(wait: Callable[..., Any], places: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def waits(*args: Any, **kwargs: Any) -> Any:
        places[call_site(traceback.extract_stack())] += 1
        return wait(*args, **kwargs)

    return waits


def call_site(stack: traceback.StackSummary) -> str:
    """Return the innermost line of a stack that is not torch's own, without the path's start."""
    for frame in reversed(stack):
        if not frame.filename.startswith(_INSIDE):
            return f"{package_path(frame.filename)}:{frame.lineno}"
    return "?"


def package_path(path: str) -> str:
    """Return a source file's path in its package, or in this repository."""
    return _INSTALLED.sub("", path).removeprefix(f"{REPOSITORY}/")
