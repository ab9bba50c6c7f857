"""Optimizer states that ZeRO-3 keeps in files on NVMe, as memory-mapped tensors.

Between steps, a file contains the states to be saved, element by element; it is mapped, and read
and written in place. DeepSpeed's direct I/O bypasses the page cache; the kernel keeps both
coherent.
"""

import atexit
import copy
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from harness.engine.deepspeed_0_19 import internals
from harness.files.folder_lock import make_folder
from harness.plan.machine import OPTIMIZER_FOLDER

_SECTION = "offload_optimizer"


def own_folder(config: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the JSON with nvme_path, if it is used, set to a folder of this process, and events.

    DeepSpeed names files by rank only, so two runs on a node would overwrite each other's.
    """
    section = config["zero_optimization"].get(_SECTION) or {}
    if section.get("device") != "nvme":
        return config, []
    config = copy.deepcopy(config)
    path = str(make_folder(Path(section["nvme_path"]), OPTIMIZER_FOLDER))
    config["zero_optimization"][_SECTION]["nvme_path"] = path
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    key = f"zero_optimization.{_SECTION}.nvme_path"
    return config, [{"kind": "engine_setting", "json_key": key, "value": path}]


def remove_files(engine: Any) -> None:
    """Delete the files once the engine is no longer used."""
    if internals.is_swapped(engine.optimizer):
        shutil.rmtree(engine.zero_offload_optimizer().nvme_path, ignore_errors=True)


def make_states(optimizer: Any, kinds: Collection[str]) -> None:
    """Create files of zeros for states that the optimizer would create in its first step."""
    for group, flat in enumerate(internals.zero3_flats(optimizer)):
        has_states = len(optimizer.optimizer.state[flat]) > 1
        if kinds and not has_states and internals.is_group_swapped(optimizer, group):
            numel = internals.group_numel(optimizer, group)
            internals.add_swapped_states(optimizer, flat, numel, kinds)


def flats(optimizer: Any) -> list[torch.Tensor]:
    """Return the flat master weights of every sub-group, mapped if they are in a file."""
    return [
        _mapped(optimizer, group, flat) if internals.is_group_swapped(optimizer, group) else flat
        for group, flat in enumerate(internals.zero3_flats(optimizer))
    ]


def states(optimizer: Any, mapped: list[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the optimizer's states by the tensors that `flats` returned."""
    by_flat = {}
    for group, (flat, key) in enumerate(zip(internals.zero3_flats(optimizer), mapped, strict=True)):
        state = optimizer.optimizer.state[flat]
        by_flat[key] = state
        if key is not flat:
            by_flat[key] = {
                kind: _mapped(optimizer, group, value) if torch.is_tensor(value) else value
                for kind, value in state.items()
            }
    return by_flat


def flush(mapped: list[torch.Tensor], optimizer: Any) -> None:
    """Wait until the contents of mapped files are on the drive."""
    for flat, key in zip(internals.zero3_flats(optimizer), mapped, strict=True):
        if key is not flat:
            for _, path in internals.swapped_tensors(optimizer, flat):
                file = os.open(path, os.O_RDWR)
                os.fsync(file)
                os.close(file)


def _mapped(optimizer: Any, group: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return the mapped file of a sub-group's master weights or of one of their states."""
    flat = internals.zero3_flats(optimizer)[group]
    files = internals.swapped_tensors(optimizer, flat)
    path = next(path for swapped, path in files if swapped is tensor)
    numel = internals.group_numel(optimizer, group)
    return torch.from_file(str(path), shared=True, size=numel, dtype=tensor.dtype)
