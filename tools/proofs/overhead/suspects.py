"""Suspects: differences between starts that could decide how long steps take, and their table."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.engine.allocators import LARGEST_BLOCKS
from tools.proofs.overhead.spread import COMPARED, percentiles
from tools.proofs.overhead.turns import turn_medians_s

Sides = dict[str, dict[str, list[dict[str, Any]]]]
"""By suspect, then by side: the measurements of each rank of starts that trained in turns."""
PAGES_KEPT = "freed pages kept"
"""The start that the others are compared with; all keep freed pages, but for the last two."""
PAGES_RETURNED = "pages returned"
# What the harness sets. glibc before 2.35 takes no larger threshold of blocks.
_BLOCK = LARGEST_BLOCKS[platform.libc_ver()[1].split(".") < ["2", "35"]]
_KEEP = {"MALLOC_MMAP_THRESHOLD_": f"{_BLOCK}", "MALLOC_TRIM_THRESHOLD_": f"{2**34}"}
_HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_RETURN = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}  # the default, and the harness sets nothing


@dataclass(frozen=True)
class Suspect:
    """One difference from the usual start."""

    arguments: tuple[str, ...] = ()
    """Of the harness; bare DeepSpeed has nothing like it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of both sides."""
    keeps_pages: bool = True
    """What a step frees is kept for the next: the harness sees to it, the others are told."""
    is_of_both: bool = True
    """Bare DeepSpeed is started with it, too."""
    frozen: bool = False
    """No garbage is collected from the end of the first step on."""
    unevaluated: bool = False
    """The harness: no held-out loss before the first step."""
    scattered: bool = False
    """The kernel's free memory is scattered while it starts."""

    def environment_of(self, side: str) -> dict[str, str]:
        """Return what is set for a side: "harness", "bare" or "trainer"."""
        if not self.keeps_pages:
            return {**_RETURN, **self.environment}
        return {**({} if side == "harness" else _KEEP), **self.environment}


SUSPECTS: dict[str, Suspect] = {
    PAGES_KEPT: Suspect(),
    "no watchdog": Suspect(("guard.hang_floor_s=0",), is_of_both=False),
    "no thread of batches": Suspect(("data.prefetch=0",), is_of_both=False),
    "no metrics": Suspect(
        ("log.every=1000", "log.weights_every=0", "log.attention_every=0", "log.report=false"),
        is_of_both=False,
    ),
    "no first evaluation": Suspect(unevaluated=True, is_of_both=False),
    "no garbage collection": Suspect(frozen=True),
    "one malloc arena": Suspect(environment={"MALLOC_ARENA_MAX": "1"}),
    "scattered pages": Suspect(scattered=True),
    PAGES_RETURNED: Suspect(keeps_pages=False),
    "huge pages": Suspect(environment=_HUGE, keeps_pages=False),
}
ALIKE = (
    "no watchdog",
    "no thread of batches",
    "no first evaluation",
    PAGES_KEPT,
    "scattered pages",
)
"""Whose steps do the same, in other memory at most."""

_HEAD = (
    "switched",
    "the harness / bare DeepSpeed: 5 %, **half**, 95 %",
    "the harness / with freed pages kept",
    "bare DeepSpeed / with freed pages kept",
    "page faults a step: the harness",
    "bare DeepSpeed",
    "density: the harness",
    "bare DeepSpeed",
)


def starts_of(name: str) -> Iterator[tuple[str, str]]:
    """Yield (suspect, side) of the starts that a suspect takes."""
    for side in COMPARED:
        if side == "harness" or SUSPECTS[name].is_of_both:
            yield name, side


def groups(most: int) -> list[list[tuple[str, str]]]:
    """Divide all starts into groups of at most `most` that train in turns. Each begins with the
    starts that the others are compared with.
    """
    base = list(starts_of(PAGES_KEPT))
    divided = [list(base)]
    for name in SUSPECTS:
        if name == PAGES_KEPT:
            continue
        starts = list(starts_of(name))
        if len(divided[-1]) + len(starts) > most:
            divided.append(list(base))
        divided[-1] += starts
    return divided


def suspect_rows(measured: Sequence[Sides], turns: int) -> Iterator[str]:
    """Yield the lines of a table with a row for each suspect, from the groups of all rounds.

    A ratio is that of two starts in the same turn, each turn's a value of its own. The harness is
    divided by bare DeepSpeed with the same switch where that has it.
    """
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|---|{'---:|' * (len(_HEAD) - 1)}"
    for name, suspect in SUSPECTS.items():
        both, where = suspect.is_of_both, [sides for sides in measured if name in sides]
        bare = name if both else PAGES_KEPT
        cells = [
            percentiles(_ratios(where, turns, (name, "harness"), (bare, "bare"))),
            _own(where, turns, name, "harness"),
            _own(where, turns, name, "bare") if both else "",
            _median(where, name, "harness", "page_faults"),
            _median(where, name, "bare", "page_faults") if both else "",
            _median(where, name, "harness", "density"),
            _median(where, name, "bare", "density") if both else "",
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def _ratios(
    measured: Sequence[Sides], turns: int, over: tuple[str, str], under: tuple[str, str]
) -> list[float]:
    return [
        mine / other
        for sides in measured
        for mine, other in zip(
            turn_medians_s(sides[over[0]][over[1]][0], turns),
            turn_medians_s(sides[under[0]][under[1]][0], turns),
            strict=True,
        )
    ]


def _own(measured: Sequence[Sides], turns: int, name: str, side: str) -> str:
    """Return the median of a side's ratio to its start with freed pages kept."""
    if name == PAGES_KEPT:
        return ""
    return f"{statistics.median(_ratios(measured, turns, (name, side), (PAGES_KEPT, side))):.3f}"


def _median(measured: Sequence[Sides], name: str, side: str, kind: str) -> str:
    values: list[float] = []
    for sides in measured:
        value = sides[name][side][0][kind]
        values += value if isinstance(value, list) else [value]
    return f"{statistics.median(values):,.{0 if kind == 'page_faults' else 2}f}"
