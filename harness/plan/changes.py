"""Finds memory-saving changes that a plan accepts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from harness.config.assignments import COMMAND_LINE, assign, parse_assignment
from harness.config.ds_file import PREFIX
from harness.config.ds_json import DsJson
from harness.config.run_file import validated
from harness.errors import ConfigError
from harness.estimate.fit import IsPossible
from harness.plan.make import problems_of
from harness.plan.plan import Plan


def takes(plan: Plan) -> IsPossible:
    """Return a function that tells whether a run could be changed by KEY=VALUE.

    The estimate knows what a change saves; the passes of a plan know what can be combined. Any
    other change, such as the number of GPUs, is possible.
    """
    before: set[str] | None = None

    def is_possible(change: str) -> bool:
        nonlocal before
        if "=" not in change:
            return True
        if before is None:  # problems of the unchanged run, made just for its estimate
            before = {*_refusals(plan)}
        return before.issuperset(_refusals(plan, change))

    return is_possible


def _refusals(plan: Plan, change: str = "") -> Iterator[str]:
    """Yield the problems of a run after a change."""
    run, tree, assigned = plan.asked, copy.deepcopy(plan.deepspeed_given), dict[str, Any]()
    try:
        if change:
            key, value = parse_assignment(change.removeprefix(PREFIX))
            if change.startswith(PREFIX):
                assign(tree, key, value)
                assigned[key] = value
            else:
                of_run: dict[str, Any] = run.model_dump(exclude_unset=True)
                assign(of_run, key, value)
                run = validated(of_run, run.origins() | {key: COMMAND_LINE})
        yield from problems_of(run, DsJson(tree, plan.deepspeed_source, assigned), plan.world)
    except (ConfigError, ValueError) as error:
        yield str(error)
