"""The memory estimate of a run: the timelines of all ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.estimate.host import checkpoint_bytes
from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import GIB, PHASES, Evidence
from harness.estimate.rank_timeline import RankTimeline, rank_timeline, weakest
from harness.estimate.states import optimizer_class
from harness.layout.exclusions import KEYS, incompatible_axes, sequence_problems
from harness.layout.grid import Coords
from harness.layout.tensor import tensor_problems


@dataclass(frozen=True)
class Estimate:
    """The memory that a run will need."""

    inputs: Inputs
    ranks: tuple[RankTimeline, ...]
    """The ranks that differ: in each pipeline stage those that hold most and least; of
    tensor-parallel ranks the first, which none exceeds; assuming equally many tokens per expert."""
    device_bytes: int | None
    """Memory of the device; None if unknown."""

    @cached_property
    def worst(self) -> RankTimeline:
        """The rank with the largest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def fullest(self) -> list[RankTimeline]:
        """The rank with the largest peak of each pipeline stage, in stage order."""
        by_stage = {rank.stage: rank for rank in sorted(self.ranks, key=lambda rank: rank.peak)}
        return [by_stage[stage] for stage in sorted(by_stage)]

    @property
    def host_bytes_per_node(self) -> int:
        """Maximum host memory of all ranks of a node."""
        return self._per_node(lambda rank: rank.most("host"))

    @property
    def cpu_bytes_per_node(self) -> int:
        """Maximum memory of all ranks of a node if they compute on the CPU."""
        return self._per_node(lambda rank: rank.on_cpu)

    @property
    def nvme_bytes_per_node(self) -> int:
        """Swap files of all ranks of a node, in bytes."""
        return self._per_node(lambda rank: rank.most("nvme"))

    def _per_node(self, size: Callable[[RankTimeline], int]) -> int:
        """Return the bytes of the fullest node, whose neighbouring ranks may span stages."""
        most = [0] * self.inputs.grid.pipeline
        for rank in self.ranks:
            most[rank.stage] = max(most[rank.stage], size(rank))
        return fullest_node(most, self.inputs.grid.world_size, self.inputs.gpus_per_node)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint on disk, for all ranks."""
        return checkpoint_bytes(self.inputs)

    @property
    def late_bytes(self) -> int:
        """Bytes of moments that the first step allocates; a run may start and still run out."""
        states = (part for part in self.worst.parts if part.component == "moments")
        return sum(
            part.bytes for part in states if "built" not in part.phases and part.place == "device"
        )

    @property
    def evidence(self) -> Evidence:
        """The weakest evidence for any part of the peak."""
        phase = self.worst.peak_phase
        return weakest(
            part.evidence
            for part in self.worst.parts
            if phase in part.phases and part.place == "device"
        )

    @property
    def needed(self) -> int:
        """Minimum GPU bytes that the fullest rank needs."""
        return self.worst.peak + self.worst.driver.low

    @cached_property
    def verdict(self) -> str:
        """One of: fits, tight, does not fit, unknown device."""
        if self.device_bytes is None:
            return "unknown device"
        return self.worst.verdict(self.device_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values under stable keys; sizes in GiB."""
        worst, components = self.worst, self.worst.phase(self.worst.peak_phase)
        # What is never written takes no memory of a host: a bucket larger than all gradients.
        in_phase = worst.cpu_phase if self.inputs.accelerator == "cpu" else worst.phase
        on_host = worst.phase(max(PHASES, key=lambda name: worst.total(name, "host")), "host")
        saved = sum(size for name, size in components.items() if name.startswith("activations"))
        return {
            "allocated_gib": _gib(worst.peak),
            "reserved_gib": [_gib(end) for end in worst.reserved],
            "driver_gib": [_gib(end) for end in worst.driver],
            "shown_gib": [_gib(end) for end in worst.shown],
            "peak_allocated_gib": _gib(worst.peak),
            "peak_reserved_gib": _gib(worst.reserved.high),
            "peak_phase": worst.peak_phase,
            "peak_component": max(components, key=lambda name: components[name]),
            "components": {
                **{name: _gib(size) for name, size in components.items()},
                "activations_saved": _gib(saved),
            },
            "phases": {
                name: {part: _gib(size) for part, size in in_phase(name).items()} for name in PHASES
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
            "device_gib": None if self.device_bytes is None else _gib(self.device_bytes),
            "host_gib_per_node": _gib(self.host_bytes_per_node),
            "host_components_gib_per_rank": {name: _gib(size) for name, size in on_host.items()},
            "nvme_gib_per_node": _gib(self.nvme_bytes_per_node),
            "checkpoint_gib": _gib(self.checkpoint_bytes),
            "optimizer_class": optimizer_class(self.inputs),
            "layers": self.inputs.layers_by,
            "evidence": {
                "weakest": self.evidence,
                **{name: worst.evidence(name) for name in components},
            },
            "verdict": self.verdict,
        }


def division_problems(inputs: Inputs) -> list[str]:
    """Return the reasons why a division over ranks is not supported."""
    grid, shape, seq_len = inputs.grid, inputs.shape, inputs.seq_len
    axes = {key: axis for axis, key in KEYS.items()}
    problems = [
        f"{key} is {getattr(grid, axes[key])}: {why}; {use}"
        for key, why, use in incompatible_axes(shape, grid, seq_len)
    ]
    tensor = tensor_problems(shape, grid.tensor)
    problems += [f"{KEYS['tensor']} is {grid.tensor}: {why}" for why in tensor]
    sequence = sequence_problems(shape, grid.sequence, seq_len, 1 if tensor else grid.tensor)
    return problems + [f"{KEYS['sequence']} is {grid.sequence}: {why}" for why in sequence]


def fullest_node(by_stage: Sequence[int], world_size: int, gpus_per_node: int) -> int:
    """Return the fullest node's bytes, given a rank's bytes by stage; neighbours share nodes."""
    apart = world_size // len(by_stage)
    if apart % gpus_per_node == 0:
        return gpus_per_node * max(by_stage)
    sizes = [by_stage[rank // apart] for rank in range(world_size)]
    nodes = range(0, world_size, gpus_per_node)
    return max(sum(sizes[first : first + gpus_per_node]) for first in nodes)


def estimate_memory(inputs: Inputs, device_bytes: int | None = None) -> Estimate:
    """Return the timelines of the ranks that differ, for a run without `division_problems`."""
    grid = inputs.grid
    assert (grid.pipeline > 1) == (inputs.bounds is not None), "a split, and its stages"
    ranks = tuple(
        rank_timeline(inputs, grid.rank(Coords(stage, *divmod(shard, grid.sequence), 0)))
        for stage in range(grid.pipeline)
        for shard in shards_that_differ(inputs.of_stage(stage))
    )
    return Estimate(inputs, ranks, device_bytes)


def shards_that_differ(inputs: Inputs) -> list[int]:
    """Return ZeRO's shards with most and least memory: gradients are kept by whole parameters."""
    if optimizer_class(inputs) != "DeepSpeedZeroOptimizer":
        return [0]
    flats = inputs.flats
    sizes = [0] * inputs.shards
    for flat in flats:
        for rank in range(inputs.shards):
            sizes[rank] += flat.whole[flat.index(rank)]
    by_size = sorted(range(inputs.shards), key=lambda rank: -sizes[rank])
    return list(dict.fromkeys((by_size[0], by_size[-1])))


def _gib(size: float) -> float:
    return round(size / GIB, 4)
