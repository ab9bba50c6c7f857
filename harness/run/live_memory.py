"""Measures the memory of a run and compares it with the estimate."""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.checkpoint.collectives import gather_objects
from harness.engine.api import StepResult
from harness.estimate.memory_item import GIB
from harness.estimate.timeline import rank_timeline
from harness.plan.plan import Plan
from harness.run.instrument import Instrument
from harness.steps import Step

STEPS = 3
"""Steps to watch. In the first, Adam allocates moments and ZeRO-3 learns its parameter order."""
TOLERANCE = 0.1


@dataclass(frozen=True)
class Compared:
    """A predicted and a measured number of this rank, in bytes."""

    point: str
    """built | between_steps: allocated at that point; peak: maximum at any time."""
    predicted: int
    measured: int

    def __str__(self) -> str:
        error = self.predicted / max(self.measured, 1) - 1
        warning = " (!)" if abs(error) > TOLERANCE else ""
        # "z": no sign for a difference that rounds to zero.
        return f"{self.point} {self.measured / GIB:.3f} GiB, predicted {error:+z.1%}{warning}"


class MemoryCheck(Instrument):
    """Measures this rank's memory over the first steps; on CUDA, the host does not wait."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        inputs = plan.estimate and plan.estimate.inputs
        self._timeline = rank_timeline(inputs, plan.world.rank) if inputs else None
        self._measured: dict[str, int] = {"built": self._allocated()} if inputs else {}
        self._steps = 0
        self.compared: list[Compared] = []
        """The comparison, filled after the last watched step; `after` clears it."""

    def step(self, step: Step, result: StepResult) -> None:
        """Measure after a step, before its metrics line resets the peak."""
        self._steps += 1
        if self._timeline is None or self._steps > STEPS:
            return
        if self._cuda:
            peak = torch.cuda.max_memory_allocated()
            self._measured["peak"] = max(peak, self._measured.get("peak", 0))
        if self._steps == STEPS:
            self._measured["between_steps"] = self._allocated()
            self.compared = [
                Compared(point, self._predicted(point), measured)
                for point, measured in self._measured.items()
            ]

    def after(self, step: Step, line: Mapping[str, Any] | None) -> None:
        """Record predicted and measured memory of all ranks, and show the worst. Collective."""
        compared, self.compared = self.compared, []
        if not compared:
            return
        ranks = gather_objects(compared)
        if ranks:  # on rank 0, which writes
            rows = [{"rank": n, **asdict(row)} for n, rows in enumerate(ranks) for row in rows]
            self._run.event("memory", step=step.number, unit="bytes", rows=rows)
            worst = max(ranks, key=lambda rows: max(abs(r.predicted - r.measured) for r in rows))
            self._run.progress.say(f"memory         {'; '.join(map(str, worst))}")
        self._run.meter.restart()

    def _allocated(self) -> int:
        if self._cuda:
            return int(torch.cuda.memory_allocated())
        return sum(storage.nbytes() for storage, _ in live_storages().values())

    def _predicted(self, point: str) -> int:
        assert self._timeline is not None
        if self._cuda:
            return self._timeline.peak if point == "peak" else self._timeline.total(point)
        host = self._timeline.phase(point, "host")  # CPU ranks have only host memory
        return self._timeline.total(point) + sum(host.values()) - host["process"]


def live_storages() -> dict[int, tuple[torch.UntypedStorage, torch.dtype]]:
    """Return every storage referenced by a Python tensor or a leaf's gradient, by id, with its
    dtype.

    Tensors on meta have no memory. Storages referenced only from C++ (saved activations) are
    missing, so the result is exact only between phases. It keeps the storages alive, so that their
    ids stay unique.
    """
    gc.collect()
    storages: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # also true of the compiler's fake tensors
            continue
        storages[storage._cdata] = (storage, tensor.dtype)
    return storages


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # Sparse tensors have no storage; no run uses them.
        if not issubclass(type(thing), torch.Tensor) or thing.layout != torch.strided:
            continue
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad


# In messages of the CPU allocator, of cuBLAS and cuDNN, and of the CUDA runtime.
_NO_MEMORY = ("can't allocate memory", "_ALLOC_FAILED", "CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if torch failed to allocate memory, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
    )
