"""Lanes: the GPUs, or threads, of trials that run at the same time on this machine."""

from __future__ import annotations

import os

from harness.layout.world import find_accelerator, listed_gpus, published_gpus
from tools.sweeps.spec import Sweep


def lane_problems(sweep: Sweep) -> list[str]:
    """Return why this machine cannot run so many trials at a time."""
    settings = sweep.settings
    needed, gpus = settings.ranks * settings.parallel, _gpus()
    if find_accelerator() == "cpu" or needed <= len(gpus):
        return []
    return [
        f"sweep.ranks {settings.ranks} x sweep.parallel {settings.parallel} are {needed} GPUs, and "
        f"{len(gpus)} are here: set fewer"
    ]


def _gpus() -> list[str]:
    """Return the GPUs that trials may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number, _ in enumerate(published_gpus() or listed_gpus())]


def lane_environment(ranks: int, parallel: int, lane: int) -> dict[str, str | None]:
    """Return the changes of the environment for the trial of a lane."""
    if find_accelerator() == "cpu":
        threads = max(1, (os.cpu_count() or 1) // (ranks * parallel))
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    mine = _gpus()[lane * ranks : (lane + 1) * ranks]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
