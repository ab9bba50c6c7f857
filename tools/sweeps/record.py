"""A trial as the journal of its sweep has it."""

from __future__ import annotations

from dataclasses import dataclass

from tools.sweeps.space import Choice


@dataclass(frozen=True)
class Used:
    """Steps, tokens and hours of a trial."""

    steps: int = 0
    tokens: int = 0
    hours: float = 0.0
    """Time that its processes ran."""


@dataclass(frozen=True)
class Record:
    """A trial as the journal has it."""

    number: int
    state: str
    """waiting, running, done, pruned, diverged or failed."""
    choice: Choice
    """Its values; empty until they are decided."""
    value: float
    """Its metric, at the end or when it was last evaluated; infinite without one."""
    used: Used
    reason: str
    """Why it failed, diverged or was stopped."""

    @property
    def has_ended(self) -> bool:
        """True if it is not to go on."""
        return self.state not in ("waiting", "running")
