"""The Plan as text: what --dry-run prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.config.ds_keys import offloaded_to
from harness.errors import ConfigError
from harness.estimate.fit import memory_line, shortages_here
from harness.layout.shape import num_parameters, parameters_by_kind
from harness.layout.stages import bubble, layers_per_stage
from harness.plan.data import glance
from harness.plan.plan import Plan
from harness.plan.swap_space import swap_problems

_LABEL_WIDTH = 15


def describe(plan: Plan) -> str:
    """Return the summary and the resolved JSON."""
    shortages = []
    if plan.estimate:
        shortages = shortages_here(plan.estimate, plan.world.local_rank, plan.config.run.dir)
    shortages += swap_problems(plan)
    try:
        data = glance(plan.config.data)
    except ConfigError as error:  # a note, not an error: the run may be elsewhere
        data = "not readable here"
        shortages += error.problems
    verdict = row("this machine", "; ".join(shortages) or "can hold it")
    title = f"DeepSpeed JSON as resolved from {plan.deepspeed_source}:"
    return "\n".join(
        [summary(plan), row("data", data), verdict, "", title, json.dumps(plan.deepspeed, indent=2)]
    )


def summary(plan: Plan) -> str:
    """Return model, layout, batch, length, learning rate and notes, one line each."""
    rows = [
        ("model", _model(plan)),
        ("parameters", _parameters(plan)),
        ("spread", spread(plan)),
        *_stages(plan),
        ("batch", _batch(plan)),
        *_ramp(plan),
        ("length", _length(plan)),
        ("optimizer", _optimizer(plan)),
        ("learning rate", _learning_rate(plan)),
        ("memory", memory_line(plan.estimate) if plan.estimate else "not estimated"),
        *(("note", _note(event)) for event in plan.events),
    ]
    return "\n".join(row(label, text) for label, text in rows)


def row(label: str, text: str) -> str:
    """Return a line of a summary."""
    return f"{label:<{_LABEL_WIDTH}}{text}"


def _model(plan: Plan) -> str:
    kind = plan.model_config["model_type"]
    source = plan.config.model.init_from
    start = f"weights from {source}" if source else "fresh random weights, nothing is loaded"
    return f"{kind} ({plan.model_source}), {start}"


def _parameters(plan: Plan) -> str:
    if plan.shape is None:
        return "not counted: the planner does not know this architecture"
    kinds = parameters_by_kind(plan.shape)
    parts = ", ".join(f"{kind} {count:,}" for kind, count in kinds.items())
    return f"{num_parameters(plan.shape):,} ({parts})"


def spread(plan: Plan) -> str:
    """Return the distribution over ranks and memory, in one line."""
    grid, world = plan.grid, plan.world
    device = world.gpu or world.accelerator
    axes = [f"{grid.data} data"]
    axes += [
        f"{size} {axis}"
        for axis in ("pipeline", "sequence", "tensor")
        if (size := getattr(grid, axis)) > 1
    ]
    offloaded = [
        f"{part} on {place}"
        for part in ("optimizer", "param")
        if (place := offloaded_to(plan.deepspeed, part)) != "none"
    ]
    ranks = f"{grid.world_size} rank{'s' if grid.world_size > 1 else ''}"
    return (
        f"ZeRO {plan.zero_stage}, {plan.precision}, {ranks} ({' x '.join(axes)}) on {device}, "
        f"offload: {', '.join(offloaded) or 'none'}, "
        f"activation checkpointing: {plan.config.model.checkpointing}{_faster(plan)}"
    )


def _faster(plan: Plan) -> str:
    model = plan.config.model
    kernels = f", kernels: {model.kernels}" if model.kernels != "none" else ""
    return kernels + (", decoder layers compiled" if model.compile else "")


def _stages(plan: Plan) -> list[tuple[str, str]]:
    if plan.stages is None:
        return []
    layers = ", ".join(map(str, layers_per_stage(plan.stages)))
    share = bubble(plan.grid.pipeline, plan.grad_accum)
    return [("stages", f"{layers} decoder layers; each waits {share:.0%} of a step (the bubble)")]


def _batch(plan: Plan) -> str:
    return (
        f"{plan.global_batch} samples a step = micro-batch {plan.micro_batch} x "
        f"{plan.grad_accum} accumulated x {plan.grid.data} data ranks, "
        f"{plan.config.data.seq_len} tokens each"
    )


def _ramp(plan: Plan) -> list[tuple[str, str]]:
    ramp, seq_len, rises = plan.config.ramp, plan.config.data.seq_len, []
    if ramp.batch_from is not None:
        rises.append(
            f"from {ramp.batch_from} samples a step by {ramp.batch_step or ramp.batch_from} to "
            f"{plan.global_batch} over {ramp.batch_tokens:,} tokens"
        )
    if ramp.length_from is not None:
        rises.append(
            f"from sequences of {ramp.length_from} tokens, doubling, to {seq_len} over "
            f"{ramp.length_tokens:,} tokens"
        )
    return [("ramp", "; ".join(rises))] if rises else []


def _length(plan: Plan) -> str:
    if plan.steps is None:
        return f"{plan.config.train.epochs:g} epochs: the data will say how many steps"
    tokens = plan.curriculum.samples_after(plan.steps) * plan.config.data.seq_len
    return f"{plan.steps:,} steps = {tokens:,} tokens"


def _optimizer(plan: Plan) -> str:
    optim = plan.config.optim
    params = plan.deepspeed["optimizer"]["params"]
    learned = (f"{key} {value}" for key, value in params.items() if key not in ("lr", "torch_adam"))
    values = ", ".join(learned)
    clipping = f"gradient norm clipped at {optim.clip_norm:g}" if optim.clip_norm else "no clipping"
    if optim.clip_value is not None:
        clipping = f"gradient elements clipped at {optim.clip_value:g}"
    rules = "".join(f"; {rule.pattern!r} otherwise" for rule in optim.groups)
    return f"{optim.name} ({values}), {clipping}{rules}"


def _learning_rate(plan: Plan) -> str:
    optim = plan.config.optim
    if not plan.steps:
        return f"{optim.schedule}, at most {optim.lr:g} after {optim.warmup_steps} steps of warm-up"
    schedule = plan.schedule(plan.steps)
    marks = sorted({1, min(max(optim.warmup_steps, 1), plan.steps), plan.steps})
    rates = ", ".join(f"{schedule.lr(step):g} at step {step:,}" for step in marks)
    return f"{optim.schedule}: {rates}"


def _note(event: Mapping[str, Any]) -> str:
    if "message" in event:
        return str(event["message"])
    if event["kind"] == "adopted":
        return f"{event['key']} = {event['value']!r}, from the JSON's {event['json_key']}"
    return str(event)
