"""Times the steps of a run as its own loop takes them."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch

from harness.run.run import Run
from tools.speed.waits import counted_waits

WINDOWS = 4


class Enough(Exception):
    """The last step that is wanted has ended."""


class Recorder:
    """Sees the end of every step of a run; raises Enough after the last.

    The host waits for the device at the ends of a few windows of steps, and nowhere else: within
    them it runs ahead as in any run. After them waits are counted for one more step.
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
    """Numbers of the steps after which the device is waited for: of the last that is not timed,
    and of the last of each window.
    """
    windows = min(WINDOWS, steps)
    return [warmup + steps * number // windows for number in range(windows + 1)]
