"""Times a run's steps in its own loop, and counts the places where the host waits for a CUDA
device.
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from harness.launch.ranks import REPOSITORY
from harness.run.run import Run

WINDOWS = 4
WARNING = "called a synchronizing CUDA operation"  # c10/cuda/CUDAFunctions.cpp
_INSIDE = (f"{Path(torch.__file__).parent}/", contextlib.__file__, warnings.__file__, __file__)
"""Path prefixes of frames that are not call sites, such as those of the installed torch."""
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_EXPLICIT = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
)
"""Waits that torch's own mode does not report."""


class Enough(Exception):
    """Raised after the last timed step."""


class Recorder:
    """Times the steps of a run; raises Enough after the last.

    The host waits for the device only at the ends of a few windows of steps; within a window it
    runs ahead as in any run. After the last window, one more step counts the waits.
    """

    def __init__(self, run: Run, warmup: int, steps: int) -> None:
        self._run = run
        self._loss_shares: list[torch.Tensor] = []
        self._ends = _ends(max(warmup, 1), steps)
        self._marks: list[float] = []
        self._waits: Counter[str] = Counter()
        self._counter: AbstractContextManager[Counter[str]] | None = None
        self._take = run.engine.train_batch
        run.engine.train_batch = self._train_batch

    def _train_batch(self, *args: Any, **kwargs: Any) -> Any:
        result = self._take(*args, **kwargs)
        self._loss_shares.append(result.loss_share.detach().clone())
        done = len(self._loss_shares)
        if done in self._ends:
            self._finish()
            self._marks.append(time.perf_counter())
        if done == self._ends[-1] and self._on_cuda:
            self._counter = counted_waits()
            self._waits = self._counter.__enter__()
        elif done >= self._ends[-1]:
            if self._counter is not None:
                self._counter.__exit__(None, None, None)
            raise Enough
        return result

    @property
    def _on_cuda(self) -> bool:
        return self._run.engine.device.type == "cuda"

    def _finish(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self._run.engine.device)

    def report(self) -> dict[str, Any]:
        """Return seconds per step, losses, and waits of the host. Collective."""
        pairs = zip(self._ends, self._ends[1:], self._marks, self._marks[1:], strict=False)
        seconds = [(late - soon) / (last - first) for first, last, soon, late in pairs]
        losses = self._run.sum(torch.stack(self._loss_shares))
        return {
            "step_time_s": statistics.median(seconds),
            "step_time_s_range": [min(seconds), max(seconds)],
            "loss": losses[self._ends[-1] - 1],
            "losses": losses[: self._ends[-1]],
            "host_waits_per_step": sum(self._waits.values()) if self._on_cuda else None,
            "host_waits": dict(self._waits.most_common()) if self._on_cuda else None,
        }


def _ends(warmup: int, steps: int) -> list[int]:
    """Return the steps after which to wait for the device: the last warmup step and the last step
    of each window.
    """
    windows = min(WINDOWS, steps)
    return [warmup + steps * number // windows for number in range(windows + 1)]


# --- waits ---


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count the waits in the body, as "harness/run/meter.py:59" -> count. Slows it down."""
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
    """Return the innermost line of a stack that is outside torch, with a shortened path."""
    for frame in reversed(stack):
        if not frame.filename.startswith(_INSIDE):
            return f"{package_path(frame.filename)}:{frame.lineno}"
    return "?"


def package_path(path: str) -> str:
    """Return a source file's path within its package or this repository."""
    return _INSTALLED.sub("", path).removeprefix(f"{REPOSITORY}/")
