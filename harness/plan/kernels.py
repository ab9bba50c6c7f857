"""Fused kernels and compilation in a plan: what they need, and what they leave unknown."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

from harness.config.run_config import RunConfig
from harness.layout.families import FAMILIES
from harness.layout.world import World

LIGER_FAMILIES = tuple(name for name, family in FAMILIES.items() if "liger" in family.compared)
"""Families whose loss and gradients were compared with the model's own code."""


def kernel_problems(
    run: RunConfig, model_type: str | None, stages: int, world: World
) -> Iterator[str]:
    """What keeps model.kernels and model.compile from being used here."""
    yield from _liger_problems(run, model_type, world)
    lacking = _compiler_lacking(world.accelerator)
    if run.model.compile and lacking:
        yield f"model.compile is true ({run.origin('model.compile')}): it needs {lacking}"
    on = {"model.kernels": run.model.kernels != "none", "model.compile": run.model.compile}
    if stages > 1 and any(on.values()):
        keys = " and ".join(f"{key} ({run.origin(key)})" for key in on if on[key])
        yield (
            f"{keys}: not with pipeline.stages={stages}, where nobody has compared them with the "
            "model as it is: leave it out, or use ZeRO 3 instead of stages"
        )


def _liger_problems(run: RunConfig, model_type: str | None, world: World) -> Iterator[str]:
    if run.model.kernels != "liger":
        return
    asked = f"model.kernels is 'liger' ({run.origin('model.kernels')})"
    if world.accelerator == "cpu" or not importlib.util.find_spec("liger_kernel"):
        yield f'{asked}: it needs a GPU and the package liger-kernel (pip install): use "none"'
    if model_type and model_type not in LIGER_FAMILIES:
        yield f'{asked}: it is for {", ".join(LIGER_FAMILIES)}, not {model_type}: use "none"'


def _compiler_lacking(accelerator: str) -> str | None:
    """What torch's compiler lacks on this machine."""
    if accelerator == "cuda":
        return None if importlib.util.find_spec("triton") else "the package triton (pip install)"
    found = any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)
    return None if found else "a C++ compiler (apt install g++)"


def kernel_notes(run: RunConfig) -> list[dict[str, Any]]:
    """Events: what the estimate does not know."""
    if run.model.kernels == "none" and not run.model.compile:
        return []
    message = "memory is estimated as if no kernels were fused and nothing compiled"
    found = [{"kind": "estimated_unfused", "message": message}]
    if run.model.kernels == "liger" and run.train.label_smoothing:
        message = "with train.label_smoothing the head is not fused with the loss (model.kernels)"
        found.append({"kind": "loss_not_fused", "message": message})
    return found
