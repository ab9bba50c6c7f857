"""Pipeline stages in a plan: the assignment of decoder layers to stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.config.ds_json import AUTO, Event, literal, value_of
from harness.estimate.timeline import rank_timeline
from harness.layout.families import given_size
from harness.layout.grid import Coords
from harness.layout.recompute import is_checkpointed
from harness.layout.stages import Bounds, balanced, bounds_of, bubble, split, split_evenly
from harness.plan.memory import memory_inputs
from harness.plan.plan import Draft, Plan

BUBBLE = "pipeline_bubble"
_STAGES, _PARTITION = "pipeline.stages", "pipeline.partition"
_BALANCES = ("time", "memory", "best")  # "best" is DeepSpeed's default and means "time"


def num_stages(ds: Mapping[str, Any]) -> int:
    """Return the number of pipeline stages in the JSON; 1 if it sets none."""
    stages = value_of(ds, _STAGES)
    return max(1, stages) if isinstance(stages, int) else 1


def split_stages(draft: Draft) -> None:
    """Divide the model's units among the stages; see `by_memory` for balancing by memory."""
    ds, problems = draft.ds, draft.problems
    stages, partition = ds.value(_STAGES), ds.value(_PARTITION)
    if not isinstance(stages, int) and stages != AUTO:
        problems.add(_STAGES, "it must be an integer")
    elif not isinstance(partition, list) and partition not in _BALANCES:
        why = 'it must be "time", "memory" or decoder layers per stage, as in [9, 7]'
        problems.add(_PARTITION, why)
    elif draft.model_config and (draft.grid.pipeline > 1 or isinstance(partition, list)):
        draft.stages = _bounds(draft, partition)


def note_pipeline(draft: Draft) -> None:
    """Note choices that the user may not have intended."""
    stages = draft.grid.pipeline
    is_explicit = isinstance(draft.ds.value(_PARTITION), list)
    if stages > 1 and draft.shape is None and not is_explicit:
        message = (
            "decoder layers are split evenly over the pipeline stages because their costs "
            "are unknown"
        )
        draft.note("even_split", message)
    if draft.batch:
        draft.events += bubble_events(stages, draft.batch.grad_accum)


def bubble_events(stages: int, accum: int) -> list[Event]:
    """Return an event if a step has fewer micro-batches than there are stages."""
    if accum >= stages:
        return []
    message = (
        f"{stages} pipeline stages wait {bubble(stages, accum):.0%} of each step with {accum} "
        "micro-batches per step: for more of them lower train.micro_batch or raise "
        "train.global_batch"
    )
    return [{"kind": BUBBLE, "message": message}]


def by_memory(plan: Plan) -> Plan:
    """Return the plan with stages balanced by memory, if requested and if memory can be counted.

    This minimises the highest peak over the ranks.
    """
    inputs = memory_inputs(plan)
    if plan.stages is None or inputs is None or literal(plan.deepspeed, _PARTITION) != "memory":
        return plan
    stages, units = plan.grid.pipeline, inputs.shape.body.units
    windows = inputs.shape.sliding_windows
    peaks: dict[Any, int] = {}

    def peak(stage: int, begin: int, end: int) -> int:
        """Return the stage's peak in bytes; identical layers are counted once."""
        first = max(begin, 1) - 1
        kept = tuple(is_checkpointed(inputs.checkpointing, n) for n in range(first, end - 1))
        alike = stage, tuple(map(id, units[begin:end])), windows[first : end - 1], kept
        if alike not in peaks:
            bounds = (begin,) * (stage + 1) + (end,) * (stages - stage - 1) + (len(units),)
            rank = plan.grid.rank(Coords(stage, 0, 0, 0))
            timeline = rank_timeline(replace(inputs, bounds=bounds), rank)
            peaks[alike] = timeline.peak
        return peaks[alike]

    return replace(plan, stages=balanced(inputs.shape.num_layers, stages, peak))


def _bounds(draft: Draft, partition: object) -> Bounds | None:
    config, shape, stages = draft.config, draft.shape, draft.grid.pipeline
    layers = shape.num_layers if shape else given_size(draft.model_config, "layers")
    if layers is None:
        draft.problems.say(
            f"{config.model.name} does not state its number of layers: remove {_STAGES}"
        )
        return None
    try:
        if isinstance(partition, list):
            bounds = bounds_of(partition, layers, stages)
        elif shape:
            run = config.model
            bounds = split(shape, stages, config.data.seq_len, run.checkpointing, run.mlp_tiles)
        else:
            bounds = split_evenly(layers, stages)
    except ValueError as error:
        key = _PARTITION if isinstance(partition, list) else _STAGES
        draft.problems.say(f"{key} ({draft.ds.origin(key)}): {error}")
        return None
    return bounds if stages > 1 else None
