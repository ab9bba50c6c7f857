"""train.carry_state in a plan: a model that has a state, and rows that are contiguous text."""

from __future__ import annotations

from collections.abc import Iterator

from harness.layout.carried import CARRIED
from harness.plan.draft import Draft
from harness.plan.pipeline import num_stages

_KEY = "train.carry_state"


def check_carried(draft: Draft) -> None:
    """Refuse to carry the state of models without one, and what divides it or interrupts the text
    of a row.
    """
    config, problems = draft.config, draft.problems
    if not config.train.carry_state:
        return
    kind = draft.model_config.get("model_type")
    if kind is not None and kind not in CARRIED:
        why = f"but {config.model.name} is a {kind} model, which carries no state"
        problems.add(_KEY, why, f"use one of {', '.join(CARRIED)}, or leave it out")
    for key, why, use in _in_the_way(draft):
        problems.add(key, f"but {why} with {_KEY} ({config.origin(_KEY)})", use)


def _in_the_way(draft: Draft) -> Iterator[tuple[str, str, str]]:
    """Yield each key that excludes a carried state, the reason, and what to use instead."""
    run, grid = draft.config, draft.grid
    data, model, ramp = run.data, run.model, run.ramp
    divided = "states are not divided", "use ZeRO 0 to 3 alone"
    text, whole = "each row reads one text", "windows follow each other"
    for is_on, key, why, use in (
        (num_stages(draft.ds.tree) > 1, "pipeline.stages", *divided),
        (grid.tensor > 1, "tensor_parallel.autotp_size", *divided),
        (grid.sequence > 1, "sequence_parallel_size", *divided),
        (model.compile, "model.compile", "no layer is compiled", "leave it out"),
        (model.stochastic_depth > 0, "model.stochastic_depth", "no layer is left out", "use 0"),
        (model.lora.rank is not None, "model.lora.rank", "adapters were never tried", ""),
        (bool(data.mix), "data.mix", text, "set data.path instead, without data.balance"),
        (data.balance is not None, "data.balance", text, "leave it out"),
        (
            data.rehearse is not None and data.rehearse_share > 0,
            *("data.rehearse_share", text, "use 0"),
        ),
        (data.batching != "packed", "data.batching", whole, "use packed"),
        (data.packing == "whole", "data.packing", whole, "use stream"),
        (bool(data.document_mask), "data.document_mask", whole, "use false"),
        (ramp.batch_from is not None, "ramp.batch_from", "steps have equally many rows", ""),
        (ramp.length_from is not None, "ramp.length_from", "windows have one length", ""),
    ):
        if is_on:
            yield key, why, use
