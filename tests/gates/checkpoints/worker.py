"""Saves or loads with the real engine, on one rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from harness.layout.world import World
from tests.gates.checkpoints.cells import Cell, Side
from tests.gates.checkpoints.defects import planted
from tests.gates.checkpoints.trip import Place, load_half, save_half
from tests.gates.jobs import compute_alike


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
        """The side whose ranks run the job."""
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

    @property
    def label(self) -> str:
        """Label of the job on a terminal."""
        return self.result.removesuffix(".json")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Return what `asdict` gave as JSON."""
        target = values["target"] and Side(**values["target"])
        return cls(**{**values, "source": Side(**values["source"]), "target": target})


def do(job: Job, world: World, device: torch.device, out: Path) -> None:
    """Do one job on this rank; rank 0 keeps what it gave."""
    compute_alike()
    place = Place(job.precision, job.architecture, job.side, world, device, out, job.micro_batch)
    if job.target is None:
        trip = save_half(place, out / job.saved)
    else:
        again = None if job.micro_batch else out / "again" / job.label
        with planted(job.defect):
            trip = load_half(place, out / job.saved, again)
    if world.rank == 0:
        (out / job.result).write_text(json.dumps(asdict(trip)))
