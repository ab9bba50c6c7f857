"""The steps in their order: a module each, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step; `look(bench)` of its module does it and returns the figure that counts."""

    name: str
    question: str
    limit_s: float
    """On GPUs."""
    package: str = "tools.acceptance"
    """The package of its module."""

    @property
    def module(self) -> str:
        """Name of the module."""
        return f"{self.package}.{self.name}"


STEPS = (
    Step("environment", "driver, toolkit, packages, limits, links: is all there?", 90),
    Step("optimizer", "does AdamW equal torch's, and a killed build not matter?", 120),
    Step("joining", "do ranks meet under every launcher?", 90),
    Step("parity", "does every layout learn what a plain loop learns?", 240),
    Step("attention", "do all implementations give one loss and gradient?", 90),
    Step("waits", "does the host wait for the device only where it must?", 90),
    Step("saving", "is nothing lost in a save, a resume, another layout?", 120),
    Step("faults", "does every end have its exit code, on all ranks?", 150),
    Step("memory", "does a run hold what the estimate says?", 120),
    Step("speed", "how fast is a step, and what makes it so?", 180),
)
