"""Machines that a plan is made for and that are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from harness.errors import ConfigError
from harness.estimate.hardware import find_gpu
from harness.layout.world import World

USUAL_NODE = 8
"""GPUs of a node where nobody says."""


def cluster(
    gpus: int, gpus_per_node: int | None, gpu: str | None, kernels: Sequence[str] = ()
) -> World:
    """Return nodes of GPUs by name. Raises ConfigError with every problem of the numbers.

    `kernels`: those of STATE_KERNELS that are installed there.
    """
    problems = []
    if gpu is not None:
        try:
            find_gpu(gpu)
        except ValueError as error:
            problems.append(f"--gpu: {error}")
    for flag, size in (("--gpus", gpus), ("--gpus-per-node", gpus_per_node)):
        if size is not None and size < 1:
            problems.append(f"{flag} is {size}: it must be at least 1")
    per_node = min(gpus_per_node or USUAL_NODE, gpus)
    if not problems and gpus > per_node and gpus % per_node:
        problems.append(
            f"--gpus {gpus} do not fill nodes of {per_node}: use another, or --gpus-per-node"
        )
    if problems:
        raise ConfigError(problems)
    return World(
        world_size=gpus,
        local_world_size=per_node,
        accelerator="cuda",
        gpu=gpu,
        kernels=tuple(kernels),
    )
