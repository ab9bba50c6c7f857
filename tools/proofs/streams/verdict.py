"""Conditions that a run under the simulator must meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tools.proofs.streams.cells import Cell
from tools.proofs.streams.worker import Seen, Wait

HOT = ("data", "micro-batches", "step", "log", "verdict")  # the phases of every step
# The harness's waits beside the log line: (phase, file) -> why no step can do without.
DECIDES = {
    ("micro-batches", "harness/engine/expert.py"): (
        "divided experts: a rank has to know how many tokens the others send before it can make "
        "room for them, once for each layer and pass"
    ),
    ("step", "harness/engine/skip.py"): (
        "fp32 at stage 0: DeepSpeed's optimizer there steps with NaN as with anything, so that the "
        "norm is read before the step; the others of DeepSpeed read theirs"
    ),
    ("step", "harness/run/run.py"): (
        "guard.spikes=skip or rollback: loss and norm decide if the step is taken, and have to be "
        "known before it; DeepSpeed then reads its own norm at once"
    ),
}
LOGS = ("log", "harness/run/meter.py")  # once for each line of metrics


@dataclass(frozen=True)
class Row:
    """A cell and what its ranks saw."""

    cell: Cell
    ranks: list[Seen] = field(default_factory=list)
    skipped: str = ""
    """Why this machine cannot run it."""
    failure: str = ""
    """How the run failed."""

    @property
    def races(self) -> Counter[str]:
        """Conflicting accesses without an order, over all ranks, by their two places."""
        return sum((Counter(seen.races) for seen in self.ranks), Counter())

    @property
    def reuses(self) -> Counter[str]:
        """Blocks that another stream could still use when they were freed, by two places."""
        return sum((Counter(seen.reuses) for seen in self.ranks), Counter())

    @property
    def problems(self) -> list[str]:
        """Return the conditions that are not met."""
        problems = [self.failure] if self.failure else []
        problems += [f"race: {race}" for race in self.races]
        problems += [f"reused too early: {reuse}" for reuse in self.reuses]
        problems += [text for seen in self.ranks for text in _own_waits(seen.waits)]
        return sorted(set(problems))


def hot(waits: Iterable[Wait], *phases: str) -> list[Wait]:
    """Return the waits of these phases of a step, or of all of them."""
    return [wait for wait in waits if wait.phase in (phases or HOT)]


def _own_waits(waits: list[Wait]) -> list[str]:
    """Return the harness's waits in a step that should not be."""
    own = [wait for wait in hot(waits) if wait.place.startswith("harness/")]
    counts: Counter[tuple[str, str]] = Counter()
    for wait in own:
        counts[wait.phase, wait.place.partition(":")[0]] += wait.count
    return [
        f"the harness waits {count} times in {phase}: {file}"
        for (phase, file), count in counts.items()
        if not ((phase, file) in DECIDES and phase == "micro-batches")
        and count > ((phase, file) in (*DECIDES, LOGS))
    ]
