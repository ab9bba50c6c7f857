"""The memory estimate of a run: the ranks that differ, each over the phases of a step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import Any, get_args

from harness.estimate.activations import activations, attention_copies, carried_states
from harness.estimate.buffers import (
    communication,
    dequantized_weight,
    gathered_parameters,
    pipeline,
)
from harness.estimate.host import (
    checkpoint_bytes,
    driver_bytes,
    loading,
    nvme_buffers,
    pinned_rounding,
    process,
    saving,
)
from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import (
    EVIDENCE,
    FP32,
    GIB,
    PHASES,
    Evidence,
    Interval,
    MemoryItem,
    Once,
    Place,
    call,
)
from harness.estimate.reserved import reserved_bytes
from harness.estimate.states import model_states, optimizer_class
from harness.layout.exclusions import KEYS, incompatible_axes, sequence_problems
from harness.layout.grid import Coords
from harness.layout.tensor import tensor_problems

_PHASE = {name: index for index, name in enumerate(PHASES)}
PAGE = 2 * 2**20
"""Bytes that a driver allocates at a time."""
UNMODELLED = 1.04
"""Factor on the allocator model's upper bound, for kernel workspaces that are not counted."""


@dataclass(frozen=True)
class Totals:
    """Parts of a rank's memory, with their sums."""

    parts: tuple[MemoryItem, ...]
    copies: tuple[MemoryItem, ...] = ()
    """What kernels may keep in addition, which only upper bounds include."""

    @cached_property
    def sums(self) -> dict[Place, list[int]]:
        """Bytes in each of PHASES, by place."""
        sums: dict[Place, list[int]] = {place: [0] * len(PHASES) for place in get_args(Place)}
        for part in self.parts:
            for phase in part.phases:
                sums[part.place][_PHASE[phase]] += part.bytes
        return sums

    @cached_property
    def unshared(self) -> int:
        """Device memory in bytes if no component could reuse what another has freed."""
        sizes: dict[str, dict[str, int]] = {}
        for part in (*self.parts, *self.copies):
            if part.place == "device":
                by_phase = sizes.setdefault(part.component, {})
                for phase in part.phases:
                    by_phase[phase] = by_phase.get(phase, 0) + part.bytes
        most = (max(by_phase.values()) for by_phase in sizes.values() if by_phase)
        return sum(-(-size // PAGE) * PAGE for size in most)


@dataclass(frozen=True)
class RankTimeline:
    """The memory of one rank over the phases of a step."""

    rank: int
    """Global rank."""
    stage: int
    """Pipeline stage of the rank."""
    run: Inputs
    states: Totals
    batch: Totals
    """What micro-batches need, whose components are not those of `states`."""

    @cached_property
    def inputs(self) -> Inputs:
        """The run as seen by this rank's pipeline stage."""
        return self.run.of_stage(self.stage)

    @property
    def parts(self) -> tuple[MemoryItem, ...]:
        """All components of the rank's memory."""
        return *self.states.parts, *self.batch.parts

    def phase(self, name: str, place: Place = "device") -> dict[str, int]:
        """Return the bytes of each component in a phase."""
        sizes: dict[str, int] = {}
        for part in self.parts:
            if part.place == place and name in part.phases:
                sizes[part.component] = sizes.get(part.component, 0) + part.bytes
        return sizes

    def total(self, name: str, place: Place = "device") -> int:
        """Return the total bytes in a phase."""
        return self.states.sums[place][_PHASE[name]] + self.batch.sums[place][_PHASE[name]]

    @property
    def peak_phase(self) -> str:
        """The phase in which the device holds most."""
        return max(PHASES, key=self.total)

    @cached_property
    def peak(self) -> int:
        """Peak bytes of tensors on the device: torch's max_memory_allocated."""
        return self.most("device")

    def cpu_phase(self, name: str) -> dict[str, int]:
        """Return the bytes of each component in a phase for a rank on the CPU, which keeps
        everything in host memory. Bucket pages that no gradient is written to are never allocated.
        """
        touched, sizes = FP32 * self.inputs.parameters, dict[str, int]()
        for place in ("device", "host"):
            for component, size in self.phase(name, place).items():
                held = min(size, touched) if component == "gradient buckets" else size
                sizes[component] = sizes.get(component, 0) + held
        return sizes

    @cached_property
    def cpu_peak_phase(self) -> str:
        """The phase in which a rank on the CPU holds most."""
        return max(PHASES, key=lambda name: sum(self.cpu_phase(name).values()))

    @property
    def on_cpu(self) -> int:
        """Peak host memory of a rank that computes on the CPU, including its process."""
        return sum(self.cpu_phase(self.cpu_peak_phase).values())

    @property
    def occupied(self) -> int:
        """Peak bytes in the memory that limits the rank: tensors on a GPU, everything on a CPU."""
        return self.on_cpu if self.run.accelerator == "cpu" else self.peak

    @cached_property
    def reserved(self) -> Interval:
        """Bytes that torch's allocator takes from the driver.

        The lower bound is what is allocated; the upper bound is a model of the allocator plus a
        small factor for kernel temporaries that are not counted.
        """
        parts = *self.parts, *self.batch.copies
        model = reserved_bytes(self.inputs, parts, self.inputs.expandable)
        low, high = self._without_sharing
        return Interval(low, max(low, min(int(UNMODELLED * model), high)))

    @property
    def _without_sharing(self) -> Interval:
        """Bounds on reserved bytes, for any order of allocations."""
        low = -(-self.peak // PAGE) * PAGE
        return Interval(low, int(UNMODELLED * (self.states.unshared + self.batch.unshared)))

    @cached_property
    def driver(self) -> Interval:
        """Bytes that the driver reports in addition to those reserved."""
        run = self.run
        if run.accelerator == "cpu":
            return Interval(0, 0)
        return driver_bytes(run.grid, run.gpu, run.zero.secondary_ranks)

    @property
    def shown(self) -> Interval:
        """Bytes that the driver reports as used, as nvidia-smi shows them."""
        return self.reserved.plus(self.driver)

    def shown_within(self, device_bytes: int) -> Interval:
        """Return an interval that contains `shown` and gives the same answer on whether it fits a
        device, without running the allocator model if possible.
        """
        return self.loose if self.loose.high <= device_bytes else self.shown

    @property
    def loose(self) -> Interval:
        """An interval that contains `shown`, for any order of allocations."""
        return self._without_sharing.plus(self.driver)

    def verdict_by_bounds(self, device_bytes: int) -> str | None:
        """Return the verdict if it holds for any order of allocations; None otherwise."""
        if self.peak + self.driver.low > device_bytes:
            return "does not fit"
        within = 2 * self.peak + self.driver.high <= device_bytes
        return "fits" if within or self.loose.high <= device_bytes else None

    def verdict(self, device_bytes: int) -> str:
        """Return "fits" if the upper end of `shown` fits, "tight" if only the lower end does, and
        "does not fit" otherwise.

        The allocator model runs only if it decides.
        """
        if self.run.accelerator == "cpu":  # malloc reuses what it keeps
            return "fits" if self.on_cpu <= device_bytes else "does not fit"
        if decided := self.verdict_by_bounds(device_bytes):
            return decided
        return "fits" if self.shown.high <= device_bytes else "tight"

    def most(self, place: Place) -> int:
        """Return the peak bytes in a place, over all phases."""
        most: int = max(map(add, self.states.sums[place], self.batch.sums[place]))
        return most

    def evidence(self, component: str) -> Evidence:
        """Return the weakest evidence for a component on the device."""
        return weakest(part.evidence for part in self.parts if part.component == component)


def weakest(evidence: Iterable[Evidence]) -> Evidence:
    """Return the least reliable of several kinds of evidence."""
    return max(evidence, key=EVIDENCE.index)


def rank_timeline(inputs: Inputs, rank: int) -> RankTimeline:
    """Return the memory of global rank `rank`."""
    place, stage = inputs.grid.coords(rank), inputs.grid.coords(rank).pipeline
    states = _states(inputs, stage, place.data * inputs.grid.sequence + place.sequence)
    return RankTimeline(rank, stage, inputs, states, batch(inputs, stage))


def _states(inputs: Inputs, stage: int, shard: int) -> Totals:
    """Return the parts of one ZeRO shard that do not depend on micro-batches and activations."""
    here, divided = inputs.of_stage(stage), inputs.grid.tensor > 1 or inputs.grid.expert > 1
    parts = [
        *model_states(here, shard),
        *communication(here),
        dequantized_weight(here),
        *gathered_parameters(here),
        # A piece is drawn or read, then sharded.
        *loading(inputs.undivided_stage(stage) if divided else here),
        *nvme_buffers(here),
        *process(here),
        *saving(here),
    ]
    return Totals(tuple(part for part in (*parts, *pinned_rounding(here, parts)) if part.bytes))


def states_that_differ(inputs: Inputs, stage: int) -> list[tuple[int, Totals]]:
    """Return ZeRO's shards of a pipeline stage with the most and the least memory; stages 1 and 2
    keep gradients of whole parameters, so shards differ.
    """
    here, shards = inputs.of_stage(stage), [0]
    if optimizer_class(here) == "DeepSpeedZeroOptimizer":
        sizes = [sum(flat.whole[flat.index(n)] for flat in here.flats) for n in range(here.shards)]
        by_size = sorted(range(here.shards), key=lambda rank: -sizes[rank])
        shards = list(dict.fromkeys((by_size[0], by_size[-1])))
    return [(shard, _states(inputs, stage, shard)) for shard in shards]


def batch(inputs: Inputs, stage: int, once: Once = call) -> Totals:
    """Return the parts of micro-batches on a pipeline stage, which ZeRO does not affect."""
    here = inputs.of_stage(stage)
    parts = [*pipeline(here), *activations(here, once), *carried_states(here)]
    return Totals((*parts, *pinned_rounding(here, parts)), (attention_copies(here),))


@dataclass(frozen=True)
class Estimate:
    """The memory that a run will need."""

    inputs: Inputs
    ranks: tuple[RankTimeline, ...]
    """The ranks that differ: in each pipeline stage those that hold the most and the least; of
    tensor-parallel ranks the first, which none exceeds; assuming equally many tokens per expert."""
    device_bytes: int | None
    """Memory of the device; None if unknown."""

    @cached_property
    def worst(self) -> RankTimeline:
        """The rank that occupies most memory at its peak."""
        return max(self.ranks, key=lambda rank: rank.occupied)

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
        world_size, gpus_per_node = self.inputs.grid.world_size, self.inputs.gpus_per_node
        apart = world_size // len(most)
        if apart % gpus_per_node == 0:
            return gpus_per_node * max(most)
        sizes = [most[rank // apart] for rank in range(world_size)]
        nodes = range(0, world_size, gpus_per_node)
        return max(sum(sizes[first : first + gpus_per_node]) for first in nodes)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint on disk, for all ranks."""
        return checkpoint_bytes(self.inputs)

    @property
    def late_bytes(self) -> int:
        """Bytes of moments that the first step allocates: a run that started may still run out."""
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
        # Host pages that are never written take no memory: a bucket may exceed all gradients.
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


def estimate_memory(inputs: Inputs, device_bytes: int | None = None, once: Once = call) -> Estimate:
    """Return the timelines of the ranks that differ, for a run without `division_problems`."""
    grid, ranks = inputs.grid, list[RankTimeline]()
    assert (grid.pipeline > 1) == (inputs.bounds is not None), "a split, and its stages"
    for stage in range(grid.pipeline):
        of_batch: Totals = once(batch, inputs, stage, once)
        differing: list[tuple[int, Totals]] = once(states_that_differ, inputs, stage)
        for shard, states in differing:
            rank = grid.rank(Coords(stage, *divmod(shard, grid.sequence), 0))
            ranks.append(RankTimeline(rank, stage, inputs, states, of_batch))
    return Estimate(inputs, tuple(ranks), device_bytes)


def _gib(size: float) -> float:
    return round(size / GIB, 4)
