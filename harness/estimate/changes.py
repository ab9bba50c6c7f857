"""Single changes to a run that save memory, as one would type them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.estimate.dividable import division_problems
from harness.estimate.inputs import Inputs
from harness.estimate.timeline import Estimate, estimate_memory
from harness.layout.recompute import REVERSIBLE
from harness.layout.stages import split

_FEWEST_TOKENS = 256  # no shorter sample is proposed
_MOST_GPUS = 64  # times as many as now
_MOST_STAGES = 16
_TILES = 8


@dataclass(frozen=True)
class Change:
    """One change, and the estimate after it."""

    text: str
    estimate: Estimate
    saved_bytes: int


def helpful_changes(before: Estimate) -> list[Change]:
    """The changes that save memory on the device; those that make it fit first, gentlest first."""
    changes = []
    for text, inputs in _candidates(before):
        if division_problems(inputs):
            continue
        after = estimate_memory(inputs, before.device_bytes)
        saved = before.worst.peak - after.worst.peak
        if saved > 0:
            changes.append(Change(text, after, saved))
    ranking = ("fits", "tight", "does not fit", "unknown device")
    return sorted(changes, key=lambda change: ranking.index(change.estimate.verdict))


def with_stage(inputs: Inputs, stage: int) -> Inputs:
    """Return the run under another ZeRO stage, without offload that the stage does not have."""
    zero = inputs.zero
    return replace(
        inputs,
        zero=replace(
            zero,
            stage=stage,
            offload_optimizer=zero.offload_optimizer if stage else "device",
            offload_param=zero.offload_param if stage == 3 else "device",
        ),
    )


def with_micro_batch(inputs: Inputs, micro_batch: int) -> Inputs:
    """Return the run with its global batch in other micro-batches."""
    accum = -(-inputs.micro_batch * inputs.grad_accum // micro_batch)
    return replace(inputs, micro_batch=micro_batch, grad_accum=accum)


def with_stages(inputs: Inputs, stages: int) -> Inputs:
    """Return the run on the same GPUs with its model cut into pipeline stages.

    Raises ValueError for GPUs or layers that are not that many stages.
    """
    grid = replace(inputs.grid, pipeline=stages)
    recompute = inputs.checkpointing, inputs.mlp_tiles
    return replace(
        inputs,
        grid=grid,
        grad_accum=inputs.grad_accum * inputs.grid.data // grid.data,
        bounds=split(inputs.shape, stages, inputs.seq_len, *recompute),
    )


def _in_stages(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Twice as many stages, and so on, where ZeRO and what is offloaded go with stages."""
    zero, stages = inputs.zero, 2 * inputs.grid.pipeline
    offloads = zero.offload_optimizer != "device"
    reversible = inputs.checkpointing == REVERSIBLE
    while zero.stage <= 1 and not (offloads or reversible) and stages <= _MOST_STAGES:
        with contextlib.suppress(ValueError):
            yield f"ds.pipeline.stages={stages}", with_stages(inputs, stages)
        stages *= 2


def _of_long_samples(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """The changes that divide what a rank's tokens need in a layer, and move it to the host."""
    if inputs.compiled:
        return
    has_experts = bool(inputs.shape.num_experts)
    if not has_experts and inputs.mlp_tiles == 1:
        yield f"model.mlp_tiles={_TILES}", replace(inputs, mlp_tiles=_TILES)
    if inputs.checkpointing not in ("none", REVERSIBLE) and not inputs.activation_offload:
        yield "model.activation_offload=true", replace(inputs, activation_offload=True)


def _candidates(before: Estimate) -> Iterator[tuple[str, Inputs]]:
    inputs, zero = before.inputs, before.inputs.zero
    if inputs.checkpointing == "none" and not inputs.compiled:
        yield "model.checkpointing=selective", replace(inputs, checkpointing="selective")
    if inputs.checkpointing not in ("full", REVERSIBLE):
        yield "model.checkpointing=full", replace(inputs, checkpointing="full")
    yield from _of_long_samples(inputs)
    smaller = inputs.micro_batch // 2
    while smaller >= 1:
        if inputs.micro_batch % smaller == 0:
            yield f"train.micro_batch={smaller}", with_micro_batch(inputs, smaller)
        smaller //= 2
    if zero.overlap_comm and zero.stage in (1, 2):
        calm = replace(zero, overlap_given=False)
        yield "ds.zero_optimization.overlap_comm=false", replace(inputs, zero=calm)
    if zero.reduce_bucket > 50_000_000:
        small = replace(zero, reduce_bucket=50_000_000)
        yield "ds.zero_optimization.reduce_bucket_size=50000000", replace(inputs, zero=small)
    yield from _in_stages(inputs)
    pipelined = inputs.bounds is not None  # with which neither sharded gradients nor offload go
    for stage in range(zero.stage + 1, 2 if pipelined else 4):
        yield f"ds.zero_optimization.stage={stage}", with_stage(inputs, stage)
    if zero.stage and zero.offload_optimizer == "device" and not pipelined:
        away = replace(zero, offload_optimizer="host")
        yield "ds.zero_optimization.offload_optimizer.device=cpu", replace(inputs, zero=away)
    if zero.stage == 3 and zero.offload_param == "device":
        away = replace(zero, offload_param="host")
        yield "ds.zero_optimization.offload_param.device=cpu", replace(inputs, zero=away)
    if zero.stage:
        times = 2
        while times <= _MOST_GPUS:
            grid = replace(inputs.grid, world_size=inputs.grid.world_size * times)
            yield f"{grid.world_size} GPUs", replace(inputs, grid=grid)
            times *= 2
    shorter = inputs.seq_len // 2
    while shorter >= _FEWEST_TOKENS:
        yield f"data.seq_len={shorter}", replace(inputs, seq_len=shorter)
        shorter //= 2
