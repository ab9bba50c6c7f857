"""Seconds of a whole run: evaluations and saves beside its steps, failures, cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from harness.estimate.held import GIB
from harness.estimate.host import checkpoint_bytes
from harness.estimate.step_time.step import StepTime

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


HOUR = 3600.0
DAY = 24 * HOUR
MTBF_GPU_HOURS = 50_000.0
"""GPU-hours between failures that end a job: 419 unexpected ones in 54 days on 16,384 GPUs
(arXiv 2407.21783, section 3.3.4)."""


@dataclass(frozen=True)
class Job:
    """So many steps of so many seconds on so many GPUs."""

    seconds: float
    """Of steps and evaluations, without saves and failures."""
    gpus: int
    watts: float
    """Of one GPU; hosts, network and cooling are not counted."""
    save_seconds: float = 60.0
    """A save stops training so long."""
    saves: int = 0
    """How many the run config asks for; 0: as many as lose least."""
    restart_seconds: float = 600.0
    """From a failure to the next step, what is computed again left out."""

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
        """Energy of the GPUs under load, kWh."""
        return self.gpu_hours * self.watts / 1000

    @property
    def failure_seconds(self) -> float:
        """Mean time between failures of the job, seconds."""
        return MTBF_GPU_HOURS * HOUR / self.gpus

    @property
    def save_every_seconds(self) -> float:
        """The interval between saves: the run config's, or that which loses least,
        sqrt(2 x save x time between failures) (Young 1974, Daly 2006).
        """
        if self.saves:
            return self.seconds / self.saves
        return sqrt(2 * self.save_seconds * self.failure_seconds)

    @property
    def days_with_failures(self) -> float:
        """Days with saves, and with failures that each cost a restart and half an interval."""
        saves = self.save_seconds / self.save_every_seconds
        lost = (self.restart_seconds + self.save_every_seconds / 2) / self.failure_seconds
        return self.days * (1 + saves) / max(0.01, 1 - lost)

    def cost(self, price: float) -> float:
        """Return the cost at a price for a GPU-hour, with failures."""
        return self.days_with_failures * 24 * self.gpus * price
