"""The units of an estimate: a component's bytes with the phases it lives in, and intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

GIB = 2**30
Once = Callable[..., Any]
"""(part, *arguments) -> part(*arguments); a planner's own remembers parts that many runs share."""


def call(part: Callable[..., Any], *arguments: Any) -> Any:
    """Return a part of an estimate, made for this run alone."""
    return part(*arguments)


def as_size(size: float) -> str:
    """Return bytes as GiB, or as MiB below 1 GiB so that small sizes are not shown as 0.00 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.2f} MiB"


class Interval(NamedTuple):
    """A minimum and a maximum, in bytes."""

    low: int
    high: int

    def plus(self, other: Interval) -> Interval:
        """Return the sum of two independent sizes."""
        return Interval(self.low + other.low, self.high + other.high)


Evidence = Literal["measured", "traced", "read", "published", "guessed"]
"""measured: equal to live bytes of real runs; traced: equal to what autograd saves for the real
model; read: from the sources of DeepSpeed, torch or transformers; published: by others, for GPUs;
guessed: by analogy."""

EVIDENCE: tuple[Evidence, ...] = ("measured", "traced", "read", "published", "guessed")

Place = Literal["device", "host", "nvme"]

FP32 = 4  # bytes
INDEX = 8  # of an int64

# In the order of a step. `build` happens once; `built` lacks Adam's moments, which the first step
# allocates; every other phase is that of a later step.
PHASES = (
    "build",
    "built",
    "forward",
    "loss",
    "backward_first",
    "backward_last",
    "reduce",
    "gradients_ready",
    "norm",
    "cast",
    "step",
    "between_steps",
    "evaluation",
    "save",
)

ALWAYS = frozenset(PHASES)

STEPPED = ALWAYS - {"build", "built"}

BEFORE_BACKWARD = frozenset({"forward", "loss", "backward_first"})

BACKWARD = frozenset({"backward_first", "backward_last"})


@dataclass(frozen=True)
class MemoryItem:
    """The bytes that one component holds, with the phases it lives in."""

    component: str
    bytes: int
    phases: frozenset[str]
    evidence: Evidence
    place: Place = "device"
