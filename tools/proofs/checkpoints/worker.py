"""One rank of a process group that saves and loads job after job with the real engine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from harness.layout.world import World
from tools.proofs.checkpoints.cells import Cell, Side
from tools.proofs.checkpoints.defects import planted
from tools.proofs.checkpoints.trip import Place, load_half, save_half, to_json
from tools.proofs.jobs import do_jobs, job_arguments


@dataclass(frozen=True)
class Job:
    """Half a round trip. Without a target the source saves; else the target loads.

    With a `micro_batch` of its own a load only trains, to see what another order of sums does.
    """

    precision: str
    architecture: str
    source: Side
    target: Side | None = None
    micro_batch: int = 0
    defect: str | None = None

    @property
    def side(self) -> Side:
        """Whose ranks do it."""
        return self.target or self.source

    @property
    def saved(self) -> str:
        """The folder, under the output's, of what is saved first."""
        return f"saved/{self.precision}-{self.architecture}-{self.source.name}"

    @property
    def result(self) -> str:
        """The file, under the output's, that says what it gave."""
        if self.target is None:
            return f"{self.saved}.json"
        cell = Cell(self.precision, self.architecture, self.source, self.target)
        split = f"-micro-{self.micro_batch}" if self.micro_batch else ""
        planted = f" with {self.defect}" if self.defect else ""
        return f"{cell.name}{split}{planted}.json"

    def to_json(self) -> dict[str, Any]:
        """For the ranks."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """What `to_json` gave."""
        target = values["target"] and Side(**values["target"])
        return cls(**{**values, "source": Side(**values["source"]), "target": target})


def do(job: Job, world: World, device: torch.device, out: Path) -> dict[str, Any]:
    """One job on this rank."""
    place = Place(job.precision, job.architecture, job.side, world, device, out, job.micro_batch)
    if job.target is None:
        return to_json(save_half(place, out / job.saved))
    again = None if job.micro_batch else out / "again" / job.result.removesuffix(".json")
    with planted(job.defect):
        return to_json(load_half(place, out / job.saved, again))


def main() -> None:
    """Do the jobs of a file, one after the other."""
    values, out = job_arguments(__doc__)
    jobs = {job.result.removesuffix(".json"): job for job in map(Job.from_json, values)}

    def keep(job: Job, found: dict[str, Any]) -> None:
        (out / job.result).write_text(json.dumps(found))

    do_jobs(jobs, out, lambda job, world, device: do(job, world, device, out), keep)


if __name__ == "__main__":
    main()
