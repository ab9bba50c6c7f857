"""Optimizer states that ZeRO-3 keeps in files on NVMe: the files, as tensors.

Between two steps a file holds what is to be saved, element by element: it is mapped, and read and
written in place. DeepSpeed writes and reads it past the page cache; the kernel keeps both equal.
"""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

_SECTION = "offload_optimizer"


def own_folder(config: dict[str, Any]) -> dict[str, Any]:
    """The JSON with a folder of this process in the place of nvme_path, where there is one.

    DeepSpeed names files by rank alone: two runs on a node would write into each other's.
    """
    given = config["zero_optimization"].get(_SECTION) or {}
    if given.get("device") != "nvme":
        return config
    config = copy.deepcopy(config)
    path = tempfile.mkdtemp(prefix="optimizer-", dir=given["nvme_path"])
    config["zero_optimization"][_SECTION]["nvme_path"] = path
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return config


def remove_files(engine: Any) -> None:
    """Give the room on the drive back, once the engine is done."""
    if is_swapped(engine.optimizer):
        shutil.rmtree(engine.zero_offload_optimizer().nvme_path, ignore_errors=True)


def is_swapped(optimizer: Any) -> bool:
    """Whether any states are on NVMe: those of sub-groups of at least a megabyte."""
    return bool(getattr(optimizer, "swap_optimizer", False))


def make_states(optimizer: Any, kinds: Collection[str]) -> None:
    """Files of zeros for states that the optimizer makes in its first step."""
    for group, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        state = optimizer.optimizer.state[flat]
        if not kinds or not optimizer._swappable_optimizer_subgroup(group) or len(state) > 1:
            continue
        numel = _numel(optimizer, group)
        state.update({kind: torch.zeros(numel) for kind in kinds})
        swapper = optimizer.optimizer_swapper
        info = swapper._get_param_swap_info(flat)
        for path in info.get_swap_paths()[1:]:
            with Path(path).open("wb") as file:
                file.truncate(swapper._io_aligned_numel(numel) * swapper.swap_element_size)
        info.release_memory()


def flats(optimizer: Any) -> list[torch.Tensor]:
    """The flat master weights of every sub-group, mapped where they are in a file."""
    return [
        _mapped(optimizer, group, flat) if optimizer._swappable_optimizer_subgroup(group) else flat
        for group, flat in enumerate(optimizer.fp32_partitioned_groups_flat)
    ]


def states(optimizer: Any, mapped: list[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
    """The optimizer's states by the tensors that `flats` gave."""
    found = {}
    for group, (flat, key) in enumerate(
        zip(optimizer.fp32_partitioned_groups_flat, mapped, strict=True)
    ):
        state = optimizer.optimizer.state[flat]
        found[key] = state
        if key is not flat:
            found[key] = {
                kind: _mapped(optimizer, group, value) if torch.is_tensor(value) else value
                for kind, value in state.items()
            }
    return found


def flush(mapped: list[torch.Tensor], optimizer: Any) -> None:
    """What was written into mapped files is on the drive when this returns."""
    for flat, key in zip(optimizer.fp32_partitioned_groups_flat, mapped, strict=True):
        if key is not flat:
            for path in optimizer.optimizer_swapper._get_param_swap_info(flat).get_swap_paths():
                file = os.open(path, os.O_RDWR)
                os.fsync(file)
                os.close(file)


def _numel(optimizer: Any, group: int) -> int:
    return int(optimizer.fp16_partitioned_groups_flat_numel[group])


def _mapped(optimizer: Any, group: int, tensor: torch.Tensor) -> torch.Tensor:
    """The file of a sub-group's master weights or one of their states."""
    swapper = optimizer.optimizer_swapper
    info = swapper._get_param_swap_info(optimizer.fp32_partitioned_groups_flat[group])
    path = next(t.swap_path for t in info.tensors if t.compute_tensor is tensor)
    numel = _numel(optimizer, group)
    return torch.from_file(path, shared=True, size=numel, dtype=tensor.dtype)
