"""Records each step: its time, the processor's seconds, the kernel's work, the host's waits."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import resource
import sys
import time
from collections import Counter
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from tools.proofs.overhead.job import REPOSITORY, Job

# Page faults without a disk; switches of threads that waited, and of those that were sent away.
KERNEL = {"page_faults": "minflt", "waits": "nvcsw", "preemptions": "nivcsw"}
_TORCH = importlib.util.find_spec("torch")
assert _TORCH is not None
assert _TORCH.origin is not None
_INSIDE = (f"{Path(_TORCH.origin).parent}/", __file__)  # frames that are no call sites


class Enough(Exception):
    """The last step that is wanted has ended."""


class Recorder:
    """Told at the end of every step, it knows when to wait, when to count and when to stop."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        # Seconds since the command was typed, and of this process's processor.
        self.marks: dict[str, tuple[float, float]] = {}
        self.engine_s = math.nan
        """Of the harness: wall clock inside of its engine, in the step that ends."""
        self.losses: list[float] = []
        self._line = Client(job.socket_path)
        self._steps: list[dict[str, float]] = []
        self._left = job.warm_up  # steps until it waits
        self._before = _used()
        self._counters: list[Any] = []
        self._syncs: Counter[str] = Counter()
        self._collectives: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()

    def mark(self, name: str) -> None:
        """Something of the start-up is done."""
        self.marks[name] = time.monotonic() - self.job.began, time.process_time()

    @property
    def is_starting(self) -> bool:
        """True until the first step has ended."""
        return "first step" not in self.marks

    def step_done(self) -> None:
        """Raises Enough after the last step."""
        now = _used()
        step = {name: now[name] - before for name, before in self._before.items()}
        self._steps.append(step | {"engine_s": self.engine_s})
        if self.is_starting:
            self.mark("first step")
            if self.job.frozen:
                gc.collect()
                gc.freeze()
                gc.disable()
        self._left -= 1
        if not self._left:
            self._wait_for_turn()
        self._before = _used()

    def _wait_for_turn(self) -> None:
        while self._counters:
            self._counters.pop().__exit__(None, None, None)
        self._line.send((self.rank, self._steps))
        self._steps = []
        turn = self._line.recv()
        if turn is None:
            raise Enough
        self._left = turn["steps"]
        if turn["counted"]:
            self._counters = counters(self._syncs, self._collectives, self._faults)
            for counter in self._counters:
                counter.__enter__()

    def write(self) -> None:
        """Into the job's folder, a file for each rank."""
        measurements = {
            "marks": self.marks,
            "losses": self.losses,
            "syncs": self._syncs,
            "collectives": self._collectives,
            "faults": self._faults,
        }
        (Path(self.job.out) / f"rank-{self.rank}.json").write_text(json.dumps(measurements))


def _used() -> dict[str, float]:
    """Seconds on the wall, of the processor, of it in the kernel, and the kernel's work: so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step_s": time.monotonic(),
        "processor_s": time.process_time(),
        "kernel_ms": used.ru_stime * 1e3,
        **{name: getattr(used, f"ru_{of}") for name, of in KERNEL.items()},
    }


def counters(syncs: Counter[str], collectives: Counter[str], faults: Counter[str]) -> list[Any]:
    """Context managers that count, by call site, what makes the host wait for a device and the page
    faults of each operator (backward: of the line that calls it).

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
            before = _page_faults()
            result = func(*args, **(kwargs or {}))
            if mapped := _page_faults() - before:
                faults[f"{_call_site()} {name}"] += mapped
            return result

    return [Functions(), Operators()]


def _page_faults() -> int:
    """Of this thread, whose operators they are."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _call_site() -> str:
    """ "deepspeed/runtime/engine.py:2000", outside of torch."""
    frame: Any = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    path = frame.f_code.co_filename.rpartition("/site-packages/")[2]
    return f"{path.removeprefix(f'{REPOSITORY}/')}:{frame.f_lineno}"
