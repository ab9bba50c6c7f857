"""Suspects: differences between starts that could decide how long steps take, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.proofs.overhead.spread import percentiles

Sides = dict[str, dict[str, list[dict[str, Any]]]]
"""By suspect, then by side: the measurements of each rank of one start."""
NOTHING = "nothing"
_GIB = str(2**30)


@dataclass(frozen=True)
class Suspect:
    """One difference from the usual start."""

    arguments: tuple[str, ...] = ()
    """Of the harness; bare DeepSpeed has nothing like it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of both sides."""
    frozen: bool = False
    """Both sides: no garbage is collected from the end of the first step on."""
    unevaluated: bool = False
    """The harness: no held-out loss before the first step."""

    @property
    def is_of_both(self) -> bool:
        """True if bare DeepSpeed is started with it, too."""
        return bool(self.environment) or self.frozen


SUSPECTS: dict[str, Suspect] = {
    NOTHING: Suspect(),
    "no watchdog": Suspect(("guard.hang_floor_s=0",)),
    "no thread of batches": Suspect(("data.prefetch=0",)),
    "no metrics": Suspect(
        ("log.every=1000", "log.weights_every=0", "log.attention_every=0", "log.report=false")
    ),
    "no first evaluation": Suspect(unevaluated=True),
    "no garbage collection": Suspect(frozen=True),
    "one malloc arena": Suspect(environment={"MALLOC_ARENA_MAX": "1"}),
    "huge pages": Suspect(environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
    "freed pages kept": Suspect(
        environment={"MALLOC_MMAP_THRESHOLD_": _GIB, "MALLOC_TRIM_THRESHOLD_": f"{2**34}"}
    ),
}

_HEAD = (
    "switched",
    "the harness / bare DeepSpeed: 5 %, **half**, 95 %",
    "the harness / its usual start",
    "bare DeepSpeed / its usual start",
    "page faults a step: the harness",
    "bare DeepSpeed",
)


def suspect_rows(rounds: Sequence[Sides]) -> Iterator[str]:
    """Yield the lines of a table with a row for each suspect.

    Each start of the harness is divided by bare DeepSpeed's of the same round: with the same switch
    where that has it. The last columns compare both sides with their own usual start.
    """
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|---|{'---:|' * (len(_HEAD) - 1)}"
    for name, suspect in SUSPECTS.items():
        other = name if suspect.is_of_both else NOTHING
        cells = [
            percentiles(_ratios(rounds, (name, "harness"), (other, "bare"))),
            _own(rounds, name, "harness"),
            _own(rounds, name, "bare") if suspect.is_of_both else "",
            _faults(rounds, name, "harness"),
            _faults(rounds, name, "bare") if other == name else "",
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def _ratios(rounds: Sequence[Sides], over: tuple[str, str], under: tuple[str, str]) -> list[float]:
    return [_step_s(sides, *over) / _step_s(sides, *under) for sides in rounds]


def _own(rounds: Sequence[Sides], name: str, side: str) -> str:
    """Return the median of a side's ratio to its usual start of the same round."""
    if name == NOTHING:
        return ""
    return f"{statistics.median(_ratios(rounds, (name, side), (NOTHING, side))):.3f}"


def _step_s(sides: Sides, name: str, side: str) -> float:
    return statistics.median(sides[name][side][0]["step_s"])


def _faults(rounds: Sequence[Sides], name: str, side: str) -> str:
    faults = (value for sides in rounds for value in sides[name][side][0]["page_faults"])
    return f"{statistics.median(faults):,.0f}"
