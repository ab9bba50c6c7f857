"""Parts of a rank's memory summed by phase, for planners that combine the same parts in thousands
of layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import add

from harness.estimate.held import PHASES, Held
from harness.estimate.interval import Interval

_PHASE = {name: index for index, name in enumerate(PHASES)}
PAGE = 2 * 2**20
"""Bytes that a driver gives out at a time."""
UNMODELLED = 1.04
"""Reserved at most, over the model of the allocator: kernels' workspaces, which nobody counts."""


@dataclass(frozen=True, eq=False)
class Totals:
    """Parts with their sums."""

    parts: tuple[Held, ...]

    @cached_property
    def device(self) -> tuple[int, ...]:
        """Bytes of the device in each of PHASES."""
        return self._sums("device")

    @cached_property
    def host(self) -> tuple[int, ...]:
        """Bytes of the host in each of PHASES."""
        return self._sums("host")

    @cached_property
    def unshared(self) -> int:
        """Bytes of the device if no component could use what another has freed."""
        return unshared(self.parts)

    def _sums(self, place: str) -> tuple[int, ...]:
        sums = [0] * len(PHASES)
        for part in self.parts:
            if part.place == place:
                for phase in part.phases:
                    sums[_PHASE[phase]] += part.bytes
        return tuple(sums)


def peak(*totals: Totals) -> int:
    """Return the largest bytes of the device of all totals together."""
    return max(_together([each.device for each in totals]))


def host_peak(*totals: Totals) -> int:
    """Return the largest bytes of the host of all totals together."""
    return max(_together([each.host for each in totals]))


def _together(sums: list[tuple[int, ...]]) -> Iterable[int]:
    if len(sums) == 2:  # of nearly all
        return map(add, *sums)
    return map(sum, zip(*sums, strict=True))


def unshared(parts: Iterable[Held]) -> int:
    """Return the bytes of the device if no component could use what another has freed."""
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
    """Return fits or does not fit where no order of blocks decides; None where one may."""
    if peak_bytes + driver.low > device_bytes:
        return "does not fit"
    room = device_bytes - driver.high
    if 2 * peak_bytes <= room or int(UNMODELLED * unshared_bytes) <= room:
        return "fits"  # whatever the allocator makes of it
    return None
