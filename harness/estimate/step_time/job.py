"""A whole job: days, GPU-hours, energy, cost, and what failures add."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

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
