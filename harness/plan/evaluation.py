"""Lengths of evaluations in a plan, and their checks."""

from __future__ import annotations

from harness.plan.context import or_longer
from harness.plan.draft import Draft
from harness.plan.model_config import max_positions

_LONGER, _NEEDLES = "eval.seq_len", "eval.needle_lengths"


def check_evaluation(draft: Draft) -> None:
    """Refuse lengths that the model, the data or the ranks cannot evaluate."""
    run, problems = draft.config, draft.problems
    longer, needles = run.eval.seq_len, run.eval.needle_lengths
    if longer is not None and longer < run.data.seq_len:
        problems.add(_LONGER, f"it must be at least data.seq_len, which is {run.data.seq_len}")
    if longer is not None and run.data.batching != "packed":
        problems.add(_LONGER, f"but data.batching={run.data.batching} cuts no text into windows")
    limit = max_positions(draft.model_config) if draft.model_config else None
    for key, lengths in ((_LONGER, [longer] if longer else []), (_NEEDLES, needles)):
        if limit is not None and max(lengths, default=0) > limit:
            why = f"but {run.model.name} has {limit} positions"
            way = or_longer(draft.model_config, run, max(lengths))
            problems.add(key, why, f"use {limit} at most{way}")
        if any(length % draft.grid.sequence for length in lengths):
            problems.add(key, f"{draft.grid.sequence} sequence ranks cannot divide it")
