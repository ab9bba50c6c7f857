"""Records each step: its end, the processor's seconds, the kernel's work, the host's waits."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tools.proofs.overhead.job import REPOSITORY, Job

# Page faults without a disk; switches of threads that waited, and of those that were sent away.
KERNEL = {"page_faults": "minflt", "waits": "nvcsw", "preemptions": "nivcsw"}
_INSIDE = ("/torch/", "/recorder.py")  # frames that are no call sites


class Enough(Exception):
    """The last step that is wanted has ended."""


class Recorder:
    """Told at the end of every step, it knows when to count and when to stop."""

    def __init__(self, job: Job) -> None:
        self.job, self.rank = job, int(os.environ["RANK"])
        # Seconds since the command was typed, and of this process's processor.
        self.marks: dict[str, tuple[float, float]] = {}
        self.stamps: list[tuple[float, float]] = []  # (wall clock, processor), s
        self.kernel: list[dict[str, int]] = []
        """The kernel's work for this process up to the end of each step."""
        self.engine_s: list[float] = []
        """Of the harness: wall clock inside of its engine, a step."""
        self.losses: list[float] = []
        self._counters: list[Any] = []
        self._syncs: Counter[str] = Counter()
        self._collectives: Counter[str] = Counter()

    def mark(self, name: str) -> None:
        """Something of the start-up is done."""
        self.marks[name] = time.monotonic() - self.job.began, time.process_time()

    def step_done(self) -> None:
        """Raises Enough after the last step."""
        self.stamps.append((time.monotonic(), time.process_time()))
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.kernel.append({name: getattr(used, f"ru_{of}") for name, of in KERNEL.items()})
        done = len(self.stamps)
        if done == 1:
            self.mark("first step")
            if self.job.frozen:
                gc.collect()
                gc.freeze()
                gc.disable()
        if done == self.job.steps:
            for counter in reversed(self._counters):
                counter.__exit__(None, None, None)
            raise Enough
        if done == self.job.warm_up + self.job.timed:
            self._counters = counters(self._syncs, self._collectives)
            for counter in self._counters:
                counter.__enter__()

    def write(self) -> None:
        """Into the job's folder, a file for each rank."""
        first, last = self.job.warm_up, self.job.warm_up + self.job.timed
        pairs = list(itertools.pairwise(self.stamps[first - 1 : last]))
        kernel = list(itertools.pairwise(self.kernel[first - 1 : last]))
        measurements = {
            "marks": self.marks,
            "step_s": [after[0] - before[0] for before, after in pairs],
            "processor_s": [after[1] - before[1] for before, after in pairs],
            **{name: [after[name] - before[name] for before, after in kernel] for name in KERNEL},
            "engine_s": self.engine_s[first:last],
            "losses": self.losses,
            "syncs": self._syncs,
            "collectives": self._collectives,
        }
        (Path(self.job.out) / f"rank-{self.rank}.json").write_text(json.dumps(measurements))


def counters(syncs: Counter[str], collectives: Counter[str]) -> list[Any]:
    """Context managers that count, by call site, what makes the host wait for a device.

    All of `item`, `float`, `int`, `bool` and `if` on a tensor are `aten::_local_scalar_dense`; what
    gives shapes that depend on values (nonzero, masked_select, unique) waits as well. On a CPU
    tensor `tolist`, `cpu` and `numpy` call no operator, so they are caught before the dispatcher.
    """
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(func, "__name__", "") in ("tolist", "cpu", "numpy"):
                syncs[_call_site()] += 1
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.overloadpacket.__name__
            if func.namespace == "c10d":
                collectives[name] += 1
            elif name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2"):
                syncs[_call_site()] += 1
            return func(*args, **(kwargs or {}))

    return [Functions(), Operators()]


def _call_site() -> str:
    """ "deepspeed/runtime/engine.py:2000", outside of torch."""
    frame: Any = sys._getframe(2)
    while frame.f_back and any(part in frame.f_code.co_filename for part in _INSIDE):
        frame = frame.f_back
    path = frame.f_code.co_filename.rpartition("/site-packages/")[2]
    return f"{path.removeprefix(f'{REPOSITORY}/')}:{frame.f_lineno}"
