"""The cost of trials, what they have used, and the limits on all of them together."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.config.assignments import COMMAND_LINE, did_you_mean, listed
from harness.errors import ConfigError, worded
from harness.estimate.memory_item import GIB
from harness.launch.ranks import place_of
from harness.layout.world import World, find_accelerator, visible_gpus
from harness.plan.command import plan_from
from harness.plan.plan import Plan
from tools.sweeps.space import Choice
from tools.sweeps.spec import Sweep


@dataclass(frozen=True)
class Used:
    """Steps, tokens and hours of a trial."""

    steps: int = 0
    tokens: int = 0
    hours: float = 0.0  # time that its processes ran


@dataclass(frozen=True)
class Record:
    """A trial as the journal describes it."""

    number: int
    state: str  # waiting, running, done, pruned, diverged or failed
    choice: Choice  # its values; empty until they are decided
    value: float  # its metric, at the end or when it was last evaluated; infinite without one
    used: Used
    reason: str  # why it failed, diverged or was stopped

    @property
    def has_ended(self) -> bool:
        """True if it will not continue."""
        return self.state not in ("waiting", "running")


@dataclass(frozen=True)
class Cost:
    """The cost of a trial that is not stopped."""

    steps: int  # optimizer steps
    tokens: int  # tokens read in these steps
    peak_gib: float | None
    """Memory in tensors of the fullest rank; None for an unknown architecture."""


def costs(sweep: Sweep, world: World | None, problems: list[str]) -> list[Cost]:
    """Return the cost of every example of a sweep; append the problems of all plans.

    `world`: the machines of a trial; None: `sweep.ranks` processes on this machine.
    """
    trials_of: dict[str, list[int]] = {}
    results = []
    examples = [*sweep.examples()]
    for number, choice in enumerate(examples):
        try:
            results.append(cost(sweep, choice, world))
        except ConfigError as error:
            for problem in error.problems:
                of_file = problem.replace(f"({COMMAND_LINE})", f"({sweep.path})")
                trials_of.setdefault(of_file, []).append(number)
    for problem, numbers in trials_of.items():
        which = f" [{len(numbers)} of {len(examples)} trials]"
        if sweep.settings.method == "grid":  # the user cannot know the numbers of random trials
            which = f" [trials {listed(map(str, numbers))}]"
        problems.append(problem + which * (len(numbers) < len(examples)))
    for name in ("steps", "tokens"):
        limit = getattr(sweep.settings.budget, name)
        most = max((getattr(result, name) for result in results), default=0)
        if limit is not None and limit < most:
            problems.append(
                worded(f"sweep.budget.{name}", limit, str(sweep.path), f"one trial takes {most:,}")
            )
    return results


def lane_problems(sweep: Sweep) -> list[str]:
    """Return the reason why this machine cannot run that many trials at a time; empty if it can."""
    ranks, parallel, gpus = sweep.settings.ranks, sweep.settings.parallel, len(visible_gpus())
    if find_accelerator() == "cpu" or ranks * parallel <= gpus:
        return []
    return [
        f"sweep.ranks {ranks} x sweep.parallel {parallel} need {ranks * parallel} GPUs, but there "
        f"are {gpus}: lower one of them"
    ]


def cost(sweep: Sweep, choice: Choice, world: World | None) -> Cost:
    """Return a trial's cost. Raises ConfigError with every problem of its plan."""
    command = sweep.command(choice)
    environ: Mapping[str, str] = os.environ
    if world is None:
        environ = {**os.environ, **place_of(0, sweep.settings.ranks, 0)}
    plan = plan_from(command, environ, world)
    if problems := _problems(sweep, plan):
        raise ConfigError(problems)
    assert plan.steps is not None
    samples = plan.curriculum.samples_after(plan.steps)
    peak = plan.estimate.worst.peak / GIB if plan.estimate else None
    return Cost(plan.steps, samples * plan.seq_len, peak)


def _problems(sweep: Sweep, plan: Plan) -> list[str]:
    """Return the reasons why a run that could be trained cannot be a trial."""
    settings, config, problems = sweep.settings, plan.config, list[str]()
    metrics = ["eval_loss", *(f"eval_loss/{name}" for name in config.data.eval_path if name)]
    if settings.metric not in metrics:
        hint = did_you_mean(settings.metric, metrics) or f": it must be {' or '.join(metrics)}"
        problems.append(f"sweep.metric is {settings.metric!r} ({sweep.path}){hint}")
    if not config.data.held_out and not config.data.eval_path:
        problems.append("data.held_out is 0: trials are compared by their held-out loss")
    if not plan.steps:
        problems.append(
            "a trial's length must be known and above 0: set train.steps or train.tokens"
        )
    elif settings.prune and not 0 < config.eval.every < plan.steps:
        problems.append(
            f"eval.every is {config.eval.every}, but sweep.prune decides at evaluations, and a "
            f"trial has {plan.steps} steps: set it to "
            f"{max(1, int(plan.steps * settings.prune.after))}"
        )
    return problems


class Budget:
    """Limits of a sweep.

    A trial starts or resumes if its remaining steps up to the first pruning decision (without
    pruning, all of them) fit. Trials that are running when a limit is reached are interrupted, and
    resume when it is raised.
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
        before: Used = Used(),
    ) -> str | None:
        """Return which limit is reached; None if none is.

        `running`: used so far by this process's trials; `following`: the values of the next trial;
        `before`: used by earlier attempts at it, which `records` includes.
        """
        used = [running.get(record.number, record.used) for record in records]
        taken = {
            name: sum(getattr(each, name) for each in used) for name in ("steps", "tokens", "hours")
        }
        prune = self._sweep.settings.prune
        if following is not None:
            whole, share = self.cost(following), prune.after if prune else 1.0
            taken["steps"] += max(0, math.ceil(whole.steps * share) - before.steps)
            taken["tokens"] += max(0, math.ceil(whole.tokens * share) - before.tokens)
        for name, value in taken.items():
            limit = getattr(self._sweep.settings.budget, name)
            if limit is not None and (value > limit or (following is None and value >= limit)):
                return f"the budget of {limit:,} {name} is used up: raise sweep.budget.{name}"
        return None
