"""Seconds of a run beside its steps: evaluations, and saves that training waits for."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from harness.estimate.host import checkpoint_bytes
from harness.estimate.step_time.step import StepTime
from harness.estimate.units import GIB

DISK_GB_PER_S = 2.0
"""10**9 bytes a second that a node writes of a save; nobody measured yours."""
_COMPUTED = ("products", "attention", "serial", "elements", "launches")
_MOVED = ("tensor", "sequence", "expert", "stages", "weights")


@dataclass(frozen=True)
class Beside:
    """Evaluations and saves of a run. Batches are read ahead, and cost nothing."""

    evaluations: int
    evaluation_seconds: float
    """Of each: the forward passes of the held-out samples, a third of a step's computation and half
    of its exchanges for each."""
    saves: int
    """0 where the run config does not say how often."""
    save_seconds: float
    """Of each that training waits: all of its bytes on their way to the disks, or those of a GPU to
    the host where saves go on in the background (save.async)."""
    save_bytes: int

    @classmethod
    def of(
        cls,
        step: StepTime,
        steps: float,
        evaluate: tuple[int, int],
        save_every: int,
        disk_gb_per_s: float = DISK_GB_PER_S,
    ) -> Beside:
        """Return those of a run of so many steps. `evaluate`: (eval.every, eval.samples)."""
        run, (every, samples) = step.inputs, evaluate
        batches = ceil(samples / run.micro_batch / run.grid.data) + run.grid.pipeline - 1
        size, gpus = checkpoint_bytes(run), run.grid.world_size
        nodes = max(1, gpus // run.gpus_per_node)
        wait = size / (nodes * disk_gb_per_s * 1e9)
        if run.saves_in_background:
            wait = min(wait, size / gpus / step.machine.host_link_rate)
        return cls(
            evaluations=int(steps // every) if every else 0,
            evaluation_seconds=batches * forward_seconds(step),
            saves=int(steps // save_every) if save_every else 0,
            save_seconds=wait,
            save_bytes=size,
        )

    @property
    def seconds(self) -> float:
        """Of all evaluations and of the saves that the run config asks for."""
        return self.evaluating + self.saves * self.save_seconds

    @property
    def evaluating(self) -> float:
        """Of all evaluations."""
        return self.evaluations * self.evaluation_seconds

    @property
    def save_text(self) -> str:
        """A save in a few words."""
        return f"{self.save_bytes / GIB:,.1f} GiB in {self.save_seconds:,.1f} s"


def forward_seconds(step: StepTime) -> float:
    """Return the seconds of one micro-batch's forward pass."""
    terms = step.terms
    computed, moved = (sum(terms[name] for name in names) for names in (_COMPUTED, _MOVED))
    return (computed / 3 + moved / 2) / step.inputs.grad_accum
