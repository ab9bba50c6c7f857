"""The estimate: phases times components for every rank that differs, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.estimate.activations import activations
from harness.estimate.buffers import communication, gathered_parameters, pipeline
from harness.estimate.host import checkpoint_bytes, loading, nvme_buffers, process, saving
from harness.estimate.inputs import (
    EVIDENCE,
    FP32,
    GIB,
    PHASES,
    Evidence,
    Held,
    Inputs,
    Place,
)
from harness.estimate.partition import flat_groups
from harness.estimate.states import model_states, optimizer_class
from harness.layout.grid import Coords

MARGIN = 0.8
"""An estimate below this part of the card never ran out in 454 runs (Fujii et al.)."""
PROCESS = "process"


@dataclass(frozen=True)
class RankTimeline:
    """Memory of one rank over the phases of a step."""

    rank: int
    """Global rank."""
    inputs: Inputs
    """The run as this rank's pipeline stage sees it."""
    held: tuple[Held, ...]

    @property
    def stage(self) -> int:
        """Pipeline stage of the rank."""
        return self.inputs.stage or 0

    def phase(self, name: str, place: Place = "device") -> dict[str, int]:
        """Bytes of each component in a phase, the process itself left out on the device."""
        sizes: dict[str, int] = {}
        for part in self.held:
            if part.place == place and name in part.phases:
                if part.component == PROCESS and place == "device":
                    continue
                sizes[part.component] = sizes.get(part.component, 0) + part.bytes
        return sizes

    def total(self, name: str, place: Place = "device") -> int:
        """Bytes held in a phase."""
        return sum(self.phase(name, place).values())

    @cached_property
    def peak_phase(self) -> str:
        """The phase in which the device holds most."""
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        """Largest bytes in tensors on the device: torch's max_memory_allocated."""
        return self.total(self.peak_phase)

    @property
    def on_cpu(self) -> int:
        """Largest host memory where the rank computes on the CPU: all it has is there.

        Pages of a bucket that no gradient is written to are never given out.
        """
        touched = FP32 * self.inputs.parameters
        return max(
            sum(
                min(size, touched) if component == "gradient buckets" else size
                for place in ("device", "host")
                for component, size in self.phase(name, place).items()
            )
            for name in PHASES
        )

    @property
    def reserved(self) -> int:
        """Bytes that torch's allocator keeps when no phase can use another's freed blocks."""
        components: dict[str, int] = {}
        for name in PHASES:
            for component, size in self.phase(name).items():
                components[component] = max(size, components.get(component, 0))
        return sum(components.values())

    def most(self, place: Place) -> int:
        """Largest bytes at a place over all phases."""
        return max(self.total(name, place) for name in PHASES)

    def evidence(self, component: str) -> Evidence:
        """The weakest evidence of a component on the device."""
        return weakest(part.evidence for part in self.held if part.component == component)


def weakest(evidence: Iterable[Evidence]) -> Evidence:
    """The least reliable of several."""
    return max(evidence, key=EVIDENCE.index)


def rank_timeline(inputs: Inputs, rank: int) -> RankTimeline:
    """Return the memory of the global rank `rank` of a run."""
    place, whole = inputs.grid.coords(rank), inputs
    inputs = inputs.of_stage(place.pipeline)
    parts = [
        *model_states(inputs, place.data * inputs.grid.sequence + place.sequence),
        *communication(inputs),
        *pipeline(inputs),
        *gathered_parameters(inputs),
        *activations(inputs),
        *loading(whole if inputs.grid.tensor > 1 else inputs),  # AutoTP divides what is there
        *nvme_buffers(inputs),
        *process(inputs),
        *saving(inputs),
    ]
    return RankTimeline(rank, inputs, tuple(parts))


@dataclass(frozen=True)
class Estimate:
    """Memory that a run will need."""

    inputs: Inputs
    ranks: tuple[RankTimeline, ...]
    """The ranks that differ: of each pipeline stage those that hold most and least; of
    tensor-parallel ranks the first, which none exceeds."""
    device_bytes: int | None
    """Memory of the device; None where it is not known."""

    @cached_property
    def worst(self) -> RankTimeline:
        """The rank that decides."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def fullest(self) -> list[RankTimeline]:
        """The rank of each pipeline stage with the largest peak, stage by stage."""
        by_stage = {rank.stage: rank for rank in sorted(self.ranks, key=lambda rank: rank.peak)}
        return [by_stage[stage] for stage in sorted(by_stage)]

    @property
    def host_bytes_per_node(self) -> int:
        """Largest host memory of a node's ranks together."""
        return self._per_node(lambda rank: rank.most("host"))

    @property
    def cpu_bytes_per_node(self) -> int:
        """Largest memory of a node's ranks together if they compute on the CPU."""
        return self._per_node(lambda rank: rank.on_cpu)

    @property
    def nvme_bytes_per_node(self) -> int:
        """Swap files of a node's ranks together."""
        return self._per_node(lambda rank: rank.most("nvme"))

    def _per_node(self, size: Callable[[RankTimeline], int]) -> int:
        """The fullest node: nodes hold neighbouring ranks, perhaps of several pipeline stages."""
        grid, node = self.inputs.grid, self.inputs.gpus_per_node
        most = dict.fromkeys(range(grid.pipeline), 0)
        for rank in self.ranks:
            most[rank.stage] = max(most[rank.stage], size(rank))
        sizes = [most[grid.coords(rank).pipeline] for rank in range(grid.world_size)]
        return max(sum(sizes[first : first + node]) for first in range(0, len(sizes), node))

    @property
    def checkpoint_bytes(self) -> int:
        """One checkpoint on disk, of all ranks."""
        return checkpoint_bytes(self.inputs)

    @property
    def late_bytes(self) -> int:
        """Moments that the first step makes: a run can begin, and run out there."""
        states = (part for part in self.worst.held if part.component == "moments")
        return sum(
            part.bytes for part in states if "built" not in part.phases and part.place == "device"
        )

    @property
    def process_bytes(self) -> int:
        """Bytes of the device that are taken before any tensor."""
        parts = (part for part in self.worst.held if part.component == PROCESS)
        return sum(part.bytes for part in parts if part.place == "device")

    @property
    def evidence(self) -> Evidence:
        """The weakest evidence that the peak rests on."""
        phase = self.worst.peak_phase
        return weakest(
            part.evidence
            for part in self.worst.held
            if phase in part.phases and part.place == "device" and part.component != PROCESS
        )

    @property
    def verdict(self) -> str:
        """fits | fits without margin | does not fit | unknown device."""
        if self.device_bytes is None:
            return "unknown device"
        if self.worst.peak <= MARGIN * self.device_bytes:
            return "fits"
        if self.worst.peak + self.process_bytes <= self.device_bytes:
            return "fits without margin"
        return "does not fit"

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys; sizes in GiB."""
        worst, components = self.worst, self.worst.phase(self.worst.peak_phase)
        saved = sum(size for name, size in components.items() if name.startswith("activations"))
        return {
            "peak_allocated_gib": _gib(worst.peak),
            "peak_reserved_gib": _gib(worst.reserved),
            "peak_phase": worst.peak_phase,
            "peak_component": max(components, key=lambda name: components[name]),
            "components": {
                **{name: _gib(size) for name, size in components.items()},
                "activations_saved": _gib(saved),
            },
            "phases": {
                name: {part: _gib(size) for part, size in worst.phase(name).items()}
                for name in PHASES
            },
            "ranks": [
                {
                    "rank": rank.rank,
                    "pipeline_stage": rank.stage,
                    "data_rank": self.inputs.grid.coords(rank.rank).data,
                    "peak_allocated_gib": _gib(rank.peak),
                    "peak_phase": rank.peak_phase,
                }
                for rank in self.ranks
            ],
            "first_step_adds_gib": _gib(self.late_bytes),
            "process_gib": _gib(self.process_bytes),
            "device_gib": None if self.device_bytes is None else _gib(self.device_bytes),
            "host_gib_per_node": _gib(self.host_bytes_per_node),
            "host_components_gib_per_rank": {
                name: _gib(size) for name, size in _largest(worst, "host").items()
            },
            "nvme_gib_per_node": _gib(self.nvme_bytes_per_node),
            "checkpoint_gib": _gib(self.checkpoint_bytes),
            "optimizer_class": optimizer_class(self.inputs),
            "evidence": {
                "weakest": self.evidence,
                **{name: worst.evidence(name) for name in components},
            },
            "verdict": self.verdict,
        }


def estimate_memory(inputs: Inputs, device_bytes: int | None = None) -> Estimate:
    """The timelines of the ranks that differ, of a run without `division_problems`."""
    grid = inputs.grid
    assert (grid.pipeline > 1) == (inputs.bounds is not None), "a split, and its stages"
    ranks = tuple(
        rank_timeline(inputs, grid.rank(Coords(stage, *divmod(shard, grid.sequence), 0)))
        for stage in range(grid.pipeline)
        for shard in _shards_that_differ(inputs.of_stage(stage))
    )
    return Estimate(inputs, ranks, device_bytes)


def _shards_that_differ(inputs: Inputs) -> list[int]:
    """ZeRO's shard with most and that with least: gradients are kept by whole parameters."""
    if optimizer_class(inputs) != "DeepSpeedZeroOptimizer":
        return [0]
    flats = flat_groups(inputs.groups(), inputs.shards)
    sizes = [0] * inputs.shards
    for flat in flats:
        for rank, size in enumerate(flat.whole):
            sizes[rank] += size
    by_size = sorted(range(inputs.shards), key=lambda rank: -sizes[rank])
    return list(dict.fromkeys((by_size[0], by_size[-1])))


def _largest(rank: RankTimeline, place: Place) -> dict[str, int]:
    return rank.phase(max(PHASES, key=lambda name: rank.total(name, place)), place)


def _gib(size: float) -> float:
    return round(size / GIB, 4)
