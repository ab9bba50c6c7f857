"""The limit on all trials of a sweep together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from harness.layout.world import World
from tools.sweeps.cost import Cost, cost
from tools.sweeps.record import Record, Used
from tools.sweeps.space import Choice
from tools.sweeps.spec import Sweep


class Budget:
    """Limits of a sweep.

    A trial starts if as much of it fits as is taken before it could be stopped early: all of it
    without early stopping. Trials that run when a limit is reached are interrupted; they go on when
    it is raised.
    """

    def __init__(self, sweep: Sweep, world: World | None) -> None:
        self._sweep, self._world = sweep, world
        self._costs: dict[str, Cost] = {}

    def cost(self, choice: Choice) -> Cost:
        """Return the cost of a whole trial. Raises ConfigError if it cannot be planned."""
        name = repr(choice)
        if name not in self._costs:
            self._costs[name] = cost(self._sweep, choice, self._world)
        return self._costs[name]

    def is_over(
        self,
        records: Iterable[Record],
        running: Mapping[int, Used],
        following: Choice | None = None,
    ) -> str | None:
        """Return which limit is reached; None if none is.

        `running`: what trials of this process have taken until now; `following`: values of a trial
        that is to start.
        """
        used = [running.get(record.number, record.used) for record in records]
        taken: dict[str, float] = {
            "steps": sum(of.steps for of in used),
            "tokens": sum(of.tokens for of in used),
            "hours": sum(of.hours for of in used),
        }
        prune = self._sweep.settings.prune
        if following is not None:
            whole, share = self.cost(following), prune.after if prune else 1.0
            taken["steps"] += math.ceil(whole.steps * share)
            taken["tokens"] += math.ceil(whole.tokens * share)
        for name, value in taken.items():
            limit = getattr(self._sweep.settings.budget, name)
            if limit is not None and (value > limit or (following is None and value >= limit)):
                return f"the budget of {limit:,} {name} is used up: raise sweep.budget.{name}"
        return None
