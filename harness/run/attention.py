"""The attention of a run: kept by a run that resumes, fit for its data, compared as it starts."""

from __future__ import annotations

import torch

from harness.engine.processes import problem_of_any
from harness.errors import ConfigError
from harness.layout.attention_table import ATTENTIONS
from harness.plan.attention import Asked, with_attention
from harness.plan.plan import Event, Plan
from harness.run.attention_proof import Different, compare
from harness.run.resumption import saved_plan


def settle_attention(plan: Plan, documents: bool, device: torch.device) -> tuple[Plan, list[Event]]:
    """Return the plan with the attention that the run computes with, and events. Collective.

    `documents`: the batches have document boundaries, which "auto" may not have known. Raises
    ConfigError if the user's own implementation differs from the one that takes a mask.
    """
    events: list[Event] = []
    asked, is_free = Asked.by(plan, documents), bool(plan.attention_why)
    if is_free:
        attention, why = asked.chosen()
        before = _before(plan)
        is_exact = before in ATTENTIONS and ATTENTIONS[before].is_exact
        if before and is_exact and before != attention and not asked.problems(before):
            attention, why = before, "as the run began"
        if attention != plan.config.model.attention:
            plan = with_attention(plan, attention, why)
            events.append(_event("attention", attention, why))
    attention = plan.config.model.attention
    if not (ATTENTIONS[attention].takes_bounds and ATTENTIONS[attention].is_exact):
        return plan, events
    different, unknown = None, None
    try:
        compare(plan, attention, asked.masked, device)
    except Different as error:
        different = str(error)
    except Exception as error:  # of transformers or a kernel, of any kind
        unknown = f"{type(error).__name__}: {error}"
    different, unknown = problem_of_any(different), problem_of_any(unknown)
    problem = different or unknown
    if problem is None:
        return plan, events
    why = f"{attention} was not equal to {asked.masked} on this device: {problem}"
    if is_free:
        return (
            with_attention(plan, asked.masked, why),
            [*events, _event("fallback", asked.masked, why)],
        )
    if different:
        raise ConfigError(f"model.attention={attention}: {why}; use {asked.masked}, or auto")
    return plan, [*events, {"kind": "not_compared", "message": f"{attention}: {unknown}"}]


def _before(plan: Plan) -> str | None:
    """Return the implementation that the run in run.dir computes with; None for a new run."""
    saved = saved_plan(plan)
    name = saved and saved["run"].get("model", {}).get("attention")
    return name if isinstance(name, str) else None


def _event(kind: str, attention: str, why: str) -> Event:
    return {"kind": kind, "message": f"model.attention={attention}: {why}"}
