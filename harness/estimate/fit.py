"""Determines whether a plan fits this machine, and which single changes would help."""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from harness.estimate.hardware import half_precision
from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import GIB, as_size
from harness.estimate.timeline import Estimate, division_problems, estimate_memory
from harness.layout.recompute import REVERSIBLE
from harness.layout.stages import split
from harness.layout.world import World, visible_gpus

_FEWEST_TOKENS = 256  # shorter samples are not proposed
_MOST_GPUS = 64  # times the current number
_MOST_STAGES = 16
_TILES = 8


@dataclass(frozen=True)
class Change:
    """One change, with the estimate after it."""

    text: str
    estimate: Estimate
    saved_bytes: int


def helpful_changes(before: Estimate) -> list[Change]:
    """Return the changes that save memory of the device, or of the host for ranks on the CPU: the
    best verdict first, then the gentlest.
    """
    changes = []
    for text, inputs in _candidates(before):
        if division_problems(inputs):
            continue
        after = estimate_memory(inputs, before.device_bytes)
        saved = before.worst.occupied - after.worst.occupied
        if saved > 0:
            changes.append(Change(text, after, saved))
    ranking = ("fits", "tight", "does not fit", "unknown device")
    return sorted(changes, key=lambda change: ranking.index(change.estimate.verdict))


def with_stage(inputs: Inputs, stage: int) -> Inputs:
    """Return the run with another ZeRO stage, without offloading that it does not support."""
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
    """Return the run with the same global batch in other micro-batches."""
    accum = -(-inputs.micro_batch * inputs.grad_accum // micro_batch)
    return replace(inputs, micro_batch=micro_batch, grad_accum=accum)


def _in_stages(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield more pipeline stages on the same GPUs; none with ZeRO 2 or 3, offload or reversible
    layers.
    """
    zero, stages = inputs.zero, 2 * inputs.grid.pipeline
    offloads = zero.offload_optimizer != "device"
    reversible = inputs.checkpointing == REVERSIBLE
    while zero.stage <= 1 and not (offloads or reversible) and stages <= _MOST_STAGES:
        with contextlib.suppress(ValueError):  # they do not divide the GPUs or the layers
            grid = replace(inputs.grid, pipeline=stages)
            bounds = split(
                inputs.shape, stages, inputs.seq_len, inputs.checkpointing, inputs.mlp_tiles
            )
            accum = inputs.grad_accum * inputs.grid.data // grid.data
            changed = replace(inputs, grid=grid, grad_accum=accum, bounds=bounds)
            changed = replace(changed, liger=False, compiled=False)  # as the plan then chooses
            yield f"ds.pipeline.stages={stages}", changed
        stages *= 2


def _candidates(before: Estimate) -> Iterator[tuple[str, Inputs]]:
    inputs, zero = before.inputs, before.inputs.zero
    if inputs.precision == "fp32" and inputs.accelerator == "cuda":
        half = half_precision(inputs.gpu)
        changed = replace(inputs, precision=half, autocast=False)
        yield f"ds.{half}.enabled=true", changed
    if inputs.checkpointing == "none":
        yield "model.checkpointing=selective", replace(inputs, checkpointing="selective")
    if inputs.checkpointing not in ("full", REVERSIBLE):
        yield "model.checkpointing=full", replace(inputs, checkpointing="full")
    if not (inputs.compiled or inputs.shape.num_experts) and inputs.mlp_tiles == 1:
        yield f"model.mlp_tiles={_TILES}", replace(inputs, mlp_tiles=_TILES)
    keeps_inputs = inputs.checkpointing not in ("none", REVERSIBLE) and not inputs.compiled
    if keeps_inputs and not inputs.activation_offload:
        yield "model.activation_offload=true", replace(inputs, activation_offload=True)
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
    pipelined = inputs.bounds is not None  # stages exclude sharded gradients and offload
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


_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_CHANGES_SHOWN = 4
IsPossible = Callable[[str], bool]
"""Returns True if a run could be changed in this way, e.g. "model.checkpointing=full"."""


def shortages(
    estimate: Estimate,
    free_gpu: int | None,
    free_host: int | None,
    is_possible: IsPossible = lambda change: True,
) -> list[str]:
    """Return the memory that this machine lacks, with single changes that would help.

    `free_gpu`: free bytes on a GPU for this rank; `free_host`: free bytes of the node, for all its
    ranks; None if unknown.
    """
    ranks = estimate.inputs.gpus_per_node
    if estimate.inputs.accelerator == "cpu":
        needed = estimate.cpu_bytes_per_node
        return _short("host", needed, free_host, estimate, ranks, is_possible)
    return [
        *_short("GPU", estimate.needed, free_gpu, estimate, 1, is_possible),
        *_short("host", estimate.host_bytes_per_node, free_host, estimate, 0, is_possible),
    ]


def shortages_here(estimate: Estimate, world: World, is_possible: IsPossible) -> list[str]:
    """Return this machine's shortages: the rank's GPU, and host memory."""
    free_gpu = free_on_gpu(world) if estimate.inputs.accelerator == "cuda" else None
    return shortages(estimate, free_gpu, free_on_host(), is_possible)


def memory_line(estimate: Estimate) -> str:
    """Return the peak, its phase and its largest parts, on one line."""
    if estimate.inputs.accelerator == "cpu":
        return _cpu_line(estimate)
    worst, device, verdict = estimate.worst, estimate.device_bytes, ""
    if device is not None:
        verdict = f" of {_gib(device)}: {estimate.verdict}"
    low, high = (f"{end / GIB:.2f}" for end in worst.shown)
    return (
        f"{_gib(worst.peak)} in tensors per rank at most, in {worst.peak_phase} "
        f"({_largest(worst.phase(worst.peak_phase))}), {low} to {high} GiB shown by the driver"
        f"{verdict}; {_gib(estimate.host_bytes_per_node)} of host memory per node"
    )


def _cpu_line(estimate: Estimate) -> str:
    """Return the host memory of a node and of its fullest rank, including the process itself."""
    worst = estimate.worst
    largest = _largest(worst.cpu_phase(worst.cpu_peak_phase))
    return (
        f"{as_size(estimate.cpu_bytes_per_node)} of host memory per node; a rank holds "
        f"{as_size(worst.on_cpu)} at most, in {worst.cpu_peak_phase} ({largest})"
    )


def _largest(parts: Mapping[str, int]) -> str:
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {as_size(size)}" for name, size in largest)


def changes_that_help(estimate: Estimate, room_bytes: int | None, is_possible: IsPossible) -> str:
    """Return the gentlest changes that each make the run fit, or those that save most."""
    changes = helpful_changes(replace(estimate, device_bytes=room_bytes))
    if estimate.inputs.accelerator == "cpu":  # more ranks or offloading would use the same memory
        changes = [c for c in changes if "offload" not in c.text and "GPU" not in c.text]
    fitting = [change for change in changes if change.estimate.verdict == "fits"]
    for what, candidates in (
        ("any one of these makes it fit", fitting),
        ("these save most", sorted(changes, key=lambda change: -change.saved_bytes)),
    ):
        possible = (f"{c.text} (-{_gib(c.saved_bytes)})" for c in candidates if is_possible(c.text))
        if listed := ", ".join(islice(possible, _CHANGES_SHOWN)):
            return f"{what}: {listed}"
    return "no single change of this run would help"


def _short(
    kind: str,
    needed: int,
    free: int | None,
    estimate: Estimate,
    ranks_sharing: int,
    is_possible: IsPossible,
) -> list[str]:
    """Return a shortage, if any. `ranks_sharing`: number of ranks that keep their tensors in this
    memory; 0 if it only holds what is offloaded.
    """
    if free is None or needed <= free:
        return []
    advice = "use more nodes, or offload less"
    if ranks_sharing:
        advice = changes_that_help(estimate, free // ranks_sharing, is_possible)
    return [
        f"the run needs {_gib(needed)} of {kind} memory, but {_gib(free)} are free: {advice}; "
        "plan.force=true runs anyway"
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def free_on_gpu(world: World, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the bytes that a rank may still take on its GPU, from the driver; None if unknown.

    Ranks that share a GPU get equal parts of what is free. Uses no device.
    """
    names = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not names and world.ranks_per_gpu > 1:
        names = visible_gpus(environ)
    name = names[world.local_rank % len(names)] if names else str(world.local_rank)
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", name]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout) * 2**20 // world.ranks_per_gpu
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # no nvidia-smi, or a MIG slice that it does not list


def free_on_host() -> int | None:
    """Return the available host memory in bytes, within the limits of this process's cgroups."""
    try:
        available = re.search(r"MemAvailable:\s+(\d+) kB", (_PROC / "meminfo").read_text())
        group = (_PROC / "self/cgroup").read_text().partition("::")[2].strip().lstrip("/")
    except OSError:
        return None
    free = [int(available[1]) * 1024] if available else []
    for folder in (_CGROUPS / group, *(_CGROUPS / group).parents):
        try:
            limit = int((folder / "memory.max").read_text())  # ValueError: "max"
            used = re.search(r"^anon (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        free.append(limit - int(used[1] if used else 0))
    return min(free, default=None)
