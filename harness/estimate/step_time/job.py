"""Times of a whole run: steps, evaluations, saves, failures; and its cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from harness.estimate.host import checkpoint_bytes
from harness.estimate.memory_item import GIB
from harness.estimate.step_time.step import StepTime

DISK_GB_PER_S = 2.0
"""Write rate of a node's checkpoint storage in 10**9 bytes per second; a guess."""
_COMPUTED = ("products", "attention", "serial", "elements", "launches")
_MOVED = ("tensor", "sequence", "expert", "stages", "weights")


@dataclass(frozen=True)
class EvalAndSaveTime:
    """Evaluations and saves of a run. Batches are prefetched and cost nothing."""

    evaluations: int
    evaluation_seconds: float
    """Per evaluation: the forward passes of the samples of each set, each a third of a
    micro-batch's computation and half of its exchanges."""
    saves: int
    """0 if the run config does not set the interval."""
    save_seconds: float
    """Seconds per save during which training waits: for writing all bytes to disk or, with
    save.async, for copying a GPU's bytes to the host."""
    save_bytes: int

    @classmethod
    def of(
        cls,
        step: StepTime,
        steps: float,
        evaluate: tuple[int, int, int],
        save_every: int,
        disk_gb_per_s: float = DISK_GB_PER_S,
    ) -> EvalAndSaveTime:
        """Return the times of a run of `steps` steps; `evaluate`: (eval.every, eval.samples, number
        of sets).
        """
        run, (every, samples, sets) = step.inputs, evaluate
        batches = ceil(samples / run.micro_batch / run.grid.data) + run.grid.pipeline - 1
        size, gpus = checkpoint_bytes(run), run.grid.world_size
        nodes = max(1, gpus // run.gpus_per_node)
        wait = size / (nodes * disk_gb_per_s * 1e9)
        if run.saves_in_background:
            wait = min(wait, size / gpus / step.machine.host_link_rate)
        return cls(
            evaluations=int(steps // every) if every else 0,
            evaluation_seconds=sets * batches * forward_seconds(step),
            saves=int(steps // save_every) if save_every else 0,
            save_seconds=wait,
            save_bytes=size,
        )

    @property
    def evaluating(self) -> float:
        """Seconds of all evaluations."""
        return self.evaluations * self.evaluation_seconds

    @property
    def save_text(self) -> str:
        """Size and time of a save, as text."""
        return f"{self.save_bytes / GIB:,.1f} GiB in {self.save_seconds:,.1f} s"


def forward_seconds(step: StepTime) -> float:
    """Return the seconds of one micro-batch's forward pass."""
    terms = step.terms
    computed, moved = (sum(terms[name] for name in names) for names in (_COMPUTED, _MOVED))
    return (computed / 3 + moved / 2) / step.inputs.grad_accum


HOUR = 3600.0
DAY = 24 * HOUR
MTBF_GPU_HOURS = 50_000.0
"""GPU-hours between failures that end a job: 419 unexpected interruptions in 54 days on 16,384 GPUs
(arXiv 2407.21783, section 3.3.4)."""
RESTART_SECONDS = 600.0
"""Seconds from a failure to the next step, without recomputed steps."""


@dataclass(frozen=True)
class Job:
    """A run's steps on its GPUs, with saves and failures."""

    seconds: float
    """Seconds of steps and evaluations, without saves and failures."""
    gpus: int
    watts: float
    """Power of one GPU; hosts, network and cooling are not counted."""
    save_seconds: float = 60.0
    """Seconds that training waits per save."""
    saves: int = 0
    """Number of saves in the run config; 0: the number that loses the least time."""

    @property
    def days(self) -> float:
        """Days without failures."""
        return self.seconds / DAY

    @property
    def gpu_hours(self) -> float:
        """GPU-hours without failures."""
        return self.seconds / HOUR * self.gpus

    @property
    def energy_kwh(self) -> float:
        """Energy of the GPUs under load, in kWh."""
        return self.gpu_hours * self.watts / 1000

    @property
    def failure_seconds(self) -> float:
        """Mean time between failures of the job, in seconds."""
        return MTBF_GPU_HOURS * HOUR / self.gpus

    @property
    def save_every_seconds(self) -> float:
        """Seconds between saves: as in the run config, or the interval that loses the least time,
        sqrt(2 x save x time between failures) (Young 1974, Daly 2006).
        """
        if self.saves:
            return self.seconds / self.saves
        return sqrt(2 * self.save_seconds * self.failure_seconds)

    @property
    def days_with_failures(self) -> float:
        """Days including saves, and failures that each cost a restart and half an interval."""
        saves = self.save_seconds / self.save_every_seconds
        lost = (RESTART_SECONDS + self.save_every_seconds / 2) / self.failure_seconds
        return self.days * (1 + saves) / max(0.01, 1 - lost)

    def cost(self, price: float) -> float:
        """Return the cost at a price per GPU-hour, with failures."""
        return self.days_with_failures * 24 * self.gpus * price
