"""Determines whether a plan fits this machine, and which changes would help."""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from harness.estimate.hardware import half_precision
from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import GIB, as_size
from harness.estimate.timeline import Estimate, division_problems, estimate_memory
from harness.layout.adapters import Adapters
from harness.layout.recompute import REVERSIBLE
from harness.layout.stages import split
from harness.layout.world import World, visible_gpus

_FEWEST_TOKENS = 256  # shorter samples are not proposed
_MOST_GPUS = 64  # times the current number
_MOST_STAGES = 16
_TILES = 8
_RANK = 16  # of adapters


@dataclass(frozen=True)
class Change:
    """One change of a run, or two, with the estimate after it."""

    text: str
    """KEY=VALUE, twice for two changes; or N GPUs."""
    estimate: Estimate
    saved_bytes: int


@dataclass(frozen=True)
class Ways:
    """The changes that a run's plan accepts, and where to ask for other layouts."""

    accept: Callable[[str], bool] = lambda change: True
    """Returns True if a run could be changed so, e.g. "model.checkpointing=full"."""
    planner: str = ""
    """The command that compares all layouts of the job; "" if the planner does not know it."""


def helpful_changes(before: Estimate) -> list[Change]:
    """Return the single changes that save memory of the device, or of the host for ranks on the
    CPU: the gentlest first, other jobs last.
    """
    return [*_tried(before, (*_candidates(before.inputs), *_other_jobs(before.inputs)))]


def advised(before: Estimate, ways: Ways, most: int) -> tuple[str, list[Change]]:
    """Return `most` changes, and their effect as text: the gentlest that make the run fit, each by
    itself; if no single change does, two together; after both, another number of GPUs or another
    length. If nothing does, the changes that save most.
    """
    inputs = before.inputs
    layouts = [*_tried(before, _candidates(inputs))]
    jobs = [*_tried(before, _other_jobs(inputs))]

    def fitting(changes: Iterable[Change]) -> list[Change]:
        enough = (c for c in changes if c.estimate.verdict == "fits" and ways.accept(c.text))
        return [*islice(enough, most)]

    shown = fitting(layouts) or fitting(_tried(before, _pairs(inputs)))
    if shown := [*shown, *fitting(jobs)][:most]:
        return "any one of these makes it fit", shown
    saving = sorted(layouts, key=lambda change: -change.saved_bytes)
    possible = [change for change in (*saving, *jobs[::-1]) if ways.accept(change.text)]
    return "no two changes make it fit; these save most", possible[:most]


def _tried(before: Estimate, candidates: Iterable[tuple[str, Inputs]]) -> Iterator[Change]:
    """Yield the candidates that the ranks can divide and that save memory."""
    for text, inputs in candidates:
        if not division_problems(inputs):
            after = estimate_memory(inputs, before.device_bytes)
            saved = before.worst.occupied - after.worst.occupied
            if saved > 0:
                yield Change(text, after, saved)


def _pairs(inputs: Inputs) -> list[tuple[str, Inputs]]:
    """Return all pairs of changes of different keys: the dearer of the two decides their order."""
    ranks = {text: n for n, (text, _) in enumerate(_candidates(inputs))}
    pairs = dict[frozenset[str], tuple[str, Inputs]]()
    for first, changed in _candidates(inputs):
        for second, both in _candidates(changed):
            if first.partition("=")[0] != second.partition("=")[0]:
                pairs.setdefault(frozenset((first, second)), (f"{first} {second}", both))

    def cost(pair: tuple[str, Inputs]) -> list[int]:
        return sorted((ranks.get(text, len(ranks)) for text in pair[0].split()), reverse=True)

    return sorted(pairs.values(), key=cost)


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


def _candidates(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield changes of the layout, or of what is trained, for the same job on the same GPUs: the
    gentlest first.
    """
    zero = inputs.zero
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
    if inputs.accelerator == "cuda":  # on the CPU, offloading uses the same memory
        keeps_inputs = inputs.checkpointing not in ("none", REVERSIBLE) and not inputs.compiled
        if keeps_inputs and not inputs.activation_offload:
            yield "model.activation_offload=true", replace(inputs, activation_offload=True)
        if zero.stage and zero.offload_optimizer == "device" and not pipelined:
            away = replace(zero, offload_optimizer="host")
            yield "ds.zero_optimization.offload_optimizer.device=cpu", replace(inputs, zero=away)
        if zero.stage == 3 and zero.offload_param == "device":
            away = replace(zero, offload_param="host")
            yield "ds.zero_optimization.offload_param.device=cpu", replace(inputs, zero=away)
    if inputs.loads_weights and inputs.adapters is None and not pipelined:
        adapted = replace(inputs, adapters=Adapters(_RANK), liger=False, compiled=False)
        yield f"model.lora.rank={_RANK}", adapted


def _other_jobs(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield the run on more GPUs, and with shorter samples."""
    times = 2
    while inputs.zero.stage and inputs.accelerator == "cuda" and times <= _MOST_GPUS:
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


def shortages(
    estimate: Estimate, free_gpu: int | None, free_host: int | None, ways: Ways = Ways()
) -> list[str]:
    """Return the memory that this machine lacks, with changes that would help.

    `free_gpu`: free bytes on a GPU for this rank; `free_host`: free bytes of the node, for all its
    ranks; None if unknown.
    """
    ranks = estimate.inputs.gpus_per_node
    if estimate.inputs.accelerator == "cpu":
        needed = estimate.cpu_bytes_per_node
        return _short("host", needed, free_host, estimate, ranks, ways)
    return [
        *_short("GPU", estimate.needed, free_gpu, estimate, 1, ways),
        *_short("host", estimate.host_bytes_per_node, free_host, estimate, 0, ways),
    ]


def shortages_here(estimate: Estimate | None, world: World, ways: Ways) -> list[str]:
    """Return this machine's shortages: the rank's GPU, and host memory; none without estimate."""
    if estimate is None:
        return []
    free_gpu = free_on_gpu(world) if estimate.inputs.accelerator == "cuda" else None
    return shortages(estimate, free_gpu, free_on_host(), ways)


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


def changes_that_help(estimate: Estimate, room_bytes: int | None, ways: Ways) -> str:
    """Return the gentlest changes that each make the run fit, or those that save most."""
    effect, changes = advised(replace(estimate, device_bytes=room_bytes), ways, _CHANGES_SHOWN)
    listed = ", ".join(f"{change.text} (-{_gib(change.saved_bytes)})" for change in changes)
    others = f"; other layouts: {ways.planner}" if ways.planner else ""
    return f"{effect}: {listed}{others}" if listed else f"no change of this run would help{others}"


def _short(
    kind: str, needed: int, free: int | None, estimate: Estimate, ranks_sharing: int, ways: Ways
) -> list[str]:
    """Return a shortage, if any. `ranks_sharing`: number of ranks that keep their tensors in this
    memory; 0 if it only holds what is offloaded.
    """
    if free is None or needed <= free:
        return []
    advice = "use more nodes, or offload less"
    if ranks_sharing:
        advice = changes_that_help(estimate, free // ranks_sharing, ways)
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
