"""Checks for parallelism axes that cannot be combined."""

from __future__ import annotations

from dataclasses import replace

from harness.layout.exclusions import incompatible_axes
from harness.plan.draft import Draft
from harness.plan.parallelism import asked_experts
from harness.plan.plan import NOT_TRAINED


def check_together(draft: Draft) -> None:
    """Reject axes that exclude pipeline stages, before other passes drop their keys."""
    grid, experts = draft.grid, asked_experts(draft.ds)
    if grid.data * grid.sequence % experts:  # divide_experts reports this
        grid = replace(grid, world_size=grid.world_size * experts)
    grid = replace(grid, expert=experts)
    shortest = draft.config.data.seq_len // draft.curriculum.most_pieces
    for key, why, use in incompatible_axes(draft.shape, grid, shortest):
        if draft.estimating:
            draft.note(NOT_TRAINED, draft.problems.worded(key, why, use))
        else:
            draft.problems.add(key, why, use)
