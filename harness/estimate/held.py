"""The unit that memory is counted in: bytes of a component, and the phases that it lives in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Evidence = Literal["measured", "traced", "read", "published", "guessed"]
"""measured: equal to live bytes of real runs; traced: to what autograd saves of the real model;
read: in the sources of DeepSpeed, torch or transformers; published: by others, of GPUs; guessed:
by analogy."""

EVIDENCE: tuple[Evidence, ...] = ("measured", "traced", "read", "published", "guessed")

Place = Literal["device", "host", "nvme"]

FP32 = 4  # bytes

# In the order of a step.  `build` happens once; `built` lacks Adam's moments, which the first step
# makes; every other phase is that of a later step.
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
class Held:
    """Bytes that one component holds in the phases it lives in."""

    component: str
    bytes: int
    phases: frozenset[str]
    evidence: Evidence
    place: Place = "device"
