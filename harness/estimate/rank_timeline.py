"""The memory of one rank over the phases of a step: its parts and their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from harness.estimate.activations import activations, attention_copies, carried_states
from harness.estimate.buffers import communication, gathered_parameters, pipeline
from harness.estimate.host import (
    driver_bytes,
    loading,
    nvme_buffers,
    pinned_rounding,
    process,
    saving,
)
from harness.estimate.inputs import Inputs
from harness.estimate.layer_bytes import Layer, layer_activations
from harness.estimate.memory_item import (
    EVIDENCE,
    FP32,
    PHASES,
    Evidence,
    Interval,
    MemoryItem,
    Place,
)
from harness.estimate.reserved import reserved_bytes
from harness.estimate.states import model_states

_PHASE = {name: index for index, name in enumerate(PHASES)}
PAGE = 2 * 2**20
"""Bytes that a driver allocates at a time."""
UNMODELLED = 1.04
"""Factor on the allocator model's upper bound, for kernel workspaces that are not counted."""


@dataclass(frozen=True, eq=False)
class Totals:
    """Parts, with their sums."""

    parts: tuple[MemoryItem, ...]

    @cached_property
    def device(self) -> tuple[int, ...]:
        """Device memory in each of PHASES, in bytes."""
        return self._sums("device")

    @cached_property
    def host(self) -> tuple[int, ...]:
        """Host memory in each of PHASES, in bytes."""
        return self._sums("host")

    @cached_property
    def unshared(self) -> int:
        """Device memory in bytes if no component could reuse what another has freed."""
        return unshared(self.parts)

    def _sums(self, place: str) -> tuple[int, ...]:
        sums = [0] * len(PHASES)
        for part in self.parts:
            if part.place == place:
                for phase in part.phases:
                    sums[_PHASE[phase]] += part.bytes
        return tuple(sums)


def unshared(parts: Iterable[MemoryItem]) -> int:
    """Return the device memory in bytes if no component could reuse what another has freed."""
    sizes: dict[str, dict[str, int]] = {}
    for part in parts:
        if part.place == "device":
            by_phase = sizes.setdefault(part.component, {})
            for phase in part.phases:
                by_phase[phase] = by_phase.get(phase, 0) + part.bytes
    most = (max(by_phase.values()) for by_phase in sizes.values() if by_phase)
    return sum(-(-size // PAGE) * PAGE for size in most)


def verdict_without_allocator(
    peak_bytes: int, unshared_bytes: int, driver: Interval, device_bytes: int
) -> str | None:
    """Return the verdict if it holds for any order of allocations; None otherwise."""
    if peak_bytes + driver.low > device_bytes:
        return "does not fit"
    room = device_bytes - driver.high
    if 2 * peak_bytes <= room or int(UNMODELLED * unshared_bytes) <= room:
        return "fits"  # regardless of the allocator
    return None


@dataclass(frozen=True)
class RankTimeline:
    """The memory of one rank over the phases of a step."""

    rank: int
    """Global rank."""
    inputs: Inputs
    """The run as seen by this rank's pipeline stage."""
    parts: tuple[MemoryItem, ...]

    @property
    def stage(self) -> int:
        """Pipeline stage of the rank."""
        return self.inputs.stage or 0

    def phase(self, name: str, place: Place = "device") -> dict[str, int]:
        """Return the bytes of each component in a phase."""
        sizes: dict[str, int] = {}
        for part in self.parts:
            if part.place == place and name in part.phases:
                sizes[part.component] = sizes.get(part.component, 0) + part.bytes
        return sizes

    def total(self, name: str, place: Place = "device") -> int:
        """Return the total bytes in a phase."""
        return sum(self.phase(name, place).values())

    @cached_property
    def peak_phase(self) -> str:
        """The phase in which the device holds most."""
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        """Peak bytes of tensors on the device: torch's max_memory_allocated."""
        return self.total(self.peak_phase)

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

    @cached_property
    def reserved(self) -> Interval:
        """Bytes that torch's allocator takes from the driver.

        The lower bound is what is allocated; the upper bound is a model of the allocator plus a
        small factor for kernel temporaries that are not counted.
        """
        low = -(-self.peak // PAGE) * PAGE
        model = reserved_bytes(self.inputs, self._with_copies, self.inputs.expandable)
        return Interval(low, max(low, min(int(UNMODELLED * model), self._without_sharing)))

    @cached_property
    def _with_copies(self) -> tuple[MemoryItem, ...]:
        return (*self.parts, attention_copies(self.inputs))

    @cached_property
    def _without_sharing(self) -> int:
        """Upper bound on reserved bytes, for any order of allocations."""
        return int(UNMODELLED * unshared(self._with_copies))

    @property
    def driver(self) -> Interval:
        """Bytes that the driver reports in addition to those reserved."""
        inputs = self.inputs
        if inputs.accelerator == "cpu":
            return Interval(0, 0)
        return driver_bytes(inputs.grid, inputs.gpu, inputs.zero.secondary_ranks)

    @property
    def shown(self) -> Interval:
        """Bytes that the driver reports as used, as nvidia-smi shows them."""
        return self.reserved.plus(self.driver)

    def shown_within(self, device_bytes: int) -> Interval:
        """Return an interval that contains `shown` and gives the same answer on whether it fits a
        device, without running the allocator model if possible.
        """
        low = -(-self.peak // PAGE) * PAGE
        loose = Interval(low, max(low, self._without_sharing)).plus(self.driver)
        return loose if loose.high <= device_bytes else self.shown

    def verdict(self, device_bytes: int) -> str:
        """Return fits or tight, if the upper or only the lower end of `shown` fits; or does not
        fit.

        The allocator model runs only if it decides.
        """
        if self.inputs.accelerator == "cpu":  # malloc reuses what it keeps
            return "fits" if self.peak <= device_bytes else "does not fit"
        sizes = self.peak, unshared(self._with_copies), self.driver
        if decided := verdict_without_allocator(*sizes, device_bytes):
            return decided
        return "fits" if self.shown.high <= device_bytes else "tight"

    def most(self, place: Place) -> int:
        """Return the peak bytes in a place, over all phases."""
        return max(self.total(name, place) for name in PHASES)

    def evidence(self, component: str) -> Evidence:
        """Return the weakest evidence for a component on the device."""
        return weakest(part.evidence for part in self.parts if part.component == component)


def weakest(evidence: Iterable[Evidence]) -> Evidence:
    """Return the least reliable of several kinds of evidence."""
    return max(evidence, key=EVIDENCE.index)


def rank_timeline(inputs: Inputs, rank: int) -> RankTimeline:
    """Return the memory of global rank `rank`."""
    place, stage = inputs.grid.coords(rank), inputs.grid.coords(rank).pipeline
    shard = place.data * inputs.grid.sequence + place.sequence
    here = inputs.of_stage(stage)
    parts = [*state_parts(inputs, stage, shard), *batch_parts(here)]
    return RankTimeline(rank, here, (*parts, *pinned_rounding(here, parts)))


def state_parts(inputs: Inputs, stage: int, shard: int) -> Iterator[MemoryItem]:
    """Return the parts of one ZeRO shard that do not depend on micro-batches and activations."""
    here, divided = inputs.of_stage(stage), inputs.grid.tensor > 1 or inputs.grid.expert > 1
    parts = (
        *model_states(here, shard),
        *communication(here),
        *gathered_parameters(here),
        # A piece is drawn or read, then sharded.
        *loading(inputs.undivided_stage(stage) if divided else here),
        *nvme_buffers(here),
        *process(here),
        *saving(here),
    )
    return (part for part in parts if part.bytes)


def batch_parts(
    here: Inputs, layer_of: Callable[[Inputs, int], Layer] = layer_activations
) -> Iterator[MemoryItem]:
    """Yield the parts of micro-batches on a pipeline stage, which ZeRO does not affect."""
    yield from pipeline(here)
    yield from activations(here, layer_of)
    yield from carried_states(here)
