"""Pipeline stages in a plan: which decoder layers each holds, and what is worth a note."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.config.ds_json import AUTO, Source, literal, value_of
from harness.config.run_config import RunConfig
from harness.estimate.timeline import rank_timeline
from harness.layout.grid import Coords
from harness.layout.shape import Shape
from harness.layout.stages import Bounds, balanced, bounds_of, bubble, split, split_evenly
from harness.plan.memory import memory_inputs
from harness.plan.plan import Plan

_KEY = "pipeline.partition"
_BALANCES = ("time", "memory", "best")  # "best" is DeepSpeed's default, and no more than a word
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")


def num_stages(ds: Mapping[str, Any]) -> int:
    """Pipeline stages that the JSON asks for; 1 where it does not."""
    stages = value_of(ds, "pipeline.stages")
    return max(1, stages) if isinstance(stages, int) else 1


def stage_bounds(
    ds: Mapping[str, Any],
    run: RunConfig,
    config: Mapping[str, Any],
    shape: Shape | None,
    source: Source,
) -> tuple[Bounds | None, list[str]]:
    """The split over pipeline stages, None without any, and what is wrong with it.

    "memory" is balanced only once there is a plan: `by_memory`.
    """
    stages, partition = num_stages(ds), value_of(ds, _KEY)
    asked = value_of(ds, "pipeline.stages")
    if not isinstance(asked, int) and asked != AUTO:
        where = source.of("pipeline.stages")
        return None, [f"pipeline.stages is {asked!r} ({where}): it must be a whole number"]
    given = isinstance(partition, list)
    if not given and partition not in _BALANCES:
        return None, [
            f'{_KEY} is {partition!r} ({source.of(_KEY)}): it must be "time", "memory" '
            "or decoder layers per stage, as in [9, 7]"
        ]
    if not config or (stages == 1 and not given):
        return None, []
    layers = shape.num_layers if shape else _count_layers(config)
    if layers is None:
        return None, [f"{run.model.name} does not say how many layers it has: use no pipeline"]
    try:
        if given:
            bounds = bounds_of(partition, layers, stages)
        elif shape:
            recompute = run.model.checkpointing == "full"
            bounds = split(shape, stages, run.data.seq_len, recompute)
        else:
            bounds = split_evenly(layers, stages)
    except ValueError as error:
        key = _KEY if given else "pipeline.stages"
        return None, [f"{key} ({source.of(key)}): {error}"]
    return bounds if stages > 1 else None, []


def _count_layers(config: Mapping[str, Any]) -> int | None:
    counts = (config.get(key) for key in _LAYER_COUNTS)
    return next((count for count in counts if isinstance(count, int)), None)


def by_memory(plan: Plan) -> Plan:
    """The plan with its stages balanced by memory, where that is asked for and can be counted.

    The fullest rank then holds as little as possible at its peak.
    """
    inputs = memory_inputs(plan)
    if plan.stages is None or inputs is None or literal(plan.deepspeed, _KEY) != "memory":
        return plan
    stages, units, windows = (
        plan.grid.pipeline,
        inputs.shape.body.units,
        inputs.shape.sliding_windows,
    )
    known: dict[Any, int] = {}

    def peak(stage: int, begin: int, end: int) -> int:
        """Of that stage, whatever the others hold; layers that are alike are counted once."""
        alike = stage, tuple(map(id, units[begin:end])), windows[max(begin, 1) - 1 : end - 1]
        if alike not in known:
            bounds = (begin,) * (stage + 1) + (end,) * (stages - stage - 1) + (len(units),)
            first = plan.grid.rank(Coords(stage, 0, 0, 0))
            timeline = rank_timeline(replace(inputs, bounds=bounds), first)
            known[alike] = timeline.peak
        return known[alike]

    return replace(plan, stages=balanced(inputs.shape.num_layers, stages, peak))


def notes(ds: Mapping[str, Any], shape: Shape | None, grad_accum: int) -> list[dict[str, Any]]:
    """Events: what the user may not have meant."""
    stages, found = num_stages(ds), []
    if stages > 1 and shape is None and not isinstance(value_of(ds, _KEY), list):
        message = "decoder layers are split evenly over the pipeline stages, costs unknown"
        found.append({"kind": "even_split", "message": message})
    if grad_accum < stages:
        message = (
            f"{stages} pipeline stages wait {bubble(stages, grad_accum):.0%} of each step, with "
            f"{grad_accum} micro-batches in it: a smaller train.micro_batch, or a larger "
            "train.global_batch, makes more of them"
        )
        found.append({"kind": "pipeline_bubble", "message": message})
    return found
