"""Does the plan fit this machine? Asked before a device is touched, and when memory has run out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from harness.estimate.changes import helpful_changes
from harness.estimate.timeline import Estimate
from harness.estimate.units import GIB, as_size

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_CHANGES_SHOWN = 4
RUNS = "runs"  # where a run without run.dir is made
IsPossible = Callable[[str], bool]
"""Whether a run could be changed so, as in "model.checkpointing=full"."""


def _any(change: str) -> bool:
    return True


def shortages(
    estimate: Estimate,
    free_gpu: int | None,
    free_host: int | None,
    is_possible: IsPossible = _any,
) -> list[str]:
    """Return the memory that this machine lacks, with the single changes that would help.

    `free_gpu`: bytes of this rank's GPU; `free_host`: of the node, for all its ranks; None where
    nobody says.
    """
    ranks = estimate.inputs.gpus_per_node
    if estimate.inputs.accelerator == "cpu":
        needed = estimate.cpu_bytes_per_node
        return _short("host", needed, free_host, estimate, ranks, is_possible)
    return [
        *_short("GPU", estimate.needed, free_gpu, estimate, 1, is_possible),
        *_short("host", estimate.host_bytes_per_node, free_host, estimate, 0, is_possible),
    ]


def shortages_here(
    estimate: Estimate, local_rank: int, run_dir: str | None, is_possible: IsPossible = _any
) -> list[str]:
    """Return the shortages of this machine: the rank's GPU, the host and the disk of the run."""
    on_gpu = estimate.inputs.accelerator == "cuda"
    return [
        *shortages(
            estimate, free_on_gpu(local_rank) if on_gpu else None, free_on_host(), is_possible
        ),
        *_short_disk(estimate.checkpoint_bytes, Path(run_dir or RUNS)),
    ]


def _short_disk(needed: int, run_dir: Path) -> list[str]:
    """A save writes the new checkpoint before it removes an old one."""
    folder = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return []
    return [
        f"a checkpoint needs {as_size(needed)}, but {as_size(free)} are free in {folder}: make "
        "room, or choose another run.dir; plan.force=true tries it all the same"
    ]


def memory_line(estimate: Estimate) -> str:
    """Return the peak, its phase and its largest parts in one line."""
    if estimate.inputs.accelerator == "cpu":
        return _cpu_line(estimate)
    worst = estimate.worst
    largest = _largest(worst.phase(worst.peak_phase))
    return (
        f"{_gib(worst.peak)} in tensors per rank at most, in {worst.peak_phase} ({largest})"
        f"{_on_gpu(estimate)}; {_gib(estimate.host_bytes_per_node)} of host memory per node"
    )


def _cpu_line(estimate: Estimate) -> str:
    """Return the host memory of a node and of its fullest rank, whose process is a part of it."""
    worst = max(estimate.ranks, key=lambda rank: rank.on_cpu)
    largest = _largest(worst.cpu_phase(worst.cpu_peak_phase))
    return (
        f"{as_size(estimate.cpu_bytes_per_node)} of host memory per node; a rank holds "
        f"{as_size(worst.on_cpu)} at most, in {worst.cpu_peak_phase} ({largest})"
    )


def _largest(parts: Mapping[str, int]) -> str:
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {as_size(size)}" for name, size in largest)


def _on_gpu(estimate: Estimate) -> str:
    """Return the interval that the driver will show, and the verdict on a device of known size."""
    low, high = (f"{end / GIB:.2f}" for end in estimate.worst.shown)
    verdict = ""
    if estimate.device_bytes is not None:
        verdict = f" of {_gib(estimate.device_bytes)}: {estimate.verdict}"
    return f", {low} to {high} GiB shown by the driver{verdict}"


def changes_that_help(
    estimate: Estimate, room_bytes: int | None, is_possible: IsPossible = _any
) -> str:
    """The gentlest single changes that make it fit `room_bytes`, or those that save most."""
    changes = helpful_changes(replace(estimate, device_bytes=room_bytes))
    if estimate.inputs.accelerator == "cpu":  # more ranks and offload fill the same memory
        changes = [c for c in changes if "offload" not in c.text and "GPU" not in c.text]
    fitting = [change for change in changes if change.estimate.verdict == "fits"]
    for what, of in (
        ("any one of these makes it fit", fitting),
        ("these save most", sorted(changes, key=lambda change: -change.saved_bytes)),
    ):
        possible = (f"{c.text} (-{_gib(c.saved_bytes)})" for c in of if is_possible(c.text))
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
    """`ranks_sharing` ranks keep their tensors there; 0 where only what is offloaded lies there."""
    if free is None or needed <= free:
        return []
    advice = "use more nodes, or offload less"
    if ranks_sharing:
        advice = changes_that_help(estimate, free // ranks_sharing, is_possible)
    return [
        f"the run needs {_gib(needed)} of {kind} memory, but {_gib(free)} are free: {advice}; "
        "plan.force=true tries it all the same"
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def free_on_gpu(local_rank: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """Bytes free on a rank's GPU, as its driver says; None where it does not. Touches no device."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in (visible or "").split(",") if name]
    name = names[local_rank % len(names)] if names else str(local_rank)
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", name]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # no driver's tool here, or a slice of a GPU that it does not list


def free_on_host() -> int | None:
    """Bytes that the kernel can still give, within the limits of this process's control groups."""
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
