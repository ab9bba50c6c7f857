"""Compares two checkpoints tensor by tensor, and two trajectories step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from harness.checkpoint.reader import Reader
from harness.checkpoint.store import Checkpoint
from harness.errors import Unusable


def differences(first: Checkpoint, second: Checkpoint, turn: int, turns: int) -> list[str]:
    """Return the differences between two checkpoints; compare every `turns`-th tensor."""
    before, after = first.reader(), second.reader()
    names = sorted({*before.index, *after.index})
    lines = [line for name in names[turn::turns] for line in _of_tensor(name, before, after)]
    return lines + _of_scalars(first.manifest.engine, second.manifest.engine)


def _of_tensor(name: str, first: Reader, second: Reader) -> list[str]:
    contents = [_known(reader, name) for reader in (first, second)]
    if contents[0] != contents[1]:
        return [f"{name}: {contents[0]}, then {contents[1]}"]
    lines = []
    for kind in contents[0]["kinds"][0]:
        try:
            before, after = whole(first, name, kind), whole(second, name, kind)
        except Unusable as error:
            lines.append(str(error))
            continue
        unequal = (_bits(before) != _bits(after)) if before.dtype == after.dtype else None
        if unequal is None or bool(unequal.any()):
            how_many = "all of" if unequal is None else f"{int(unequal.sum())} bytes of"
            lines.append(f"{how_many} {name}/{kind} {list(before.shape)} {before.dtype} differ")
    return lines


def whole(reader: Reader, name: str, kind: str) -> torch.Tensor:
    """Return one tensor of a checkpoint; defects planted in reading do not affect this function."""
    return reader.whole(name, kind)


def _known(reader: Reader, name: str) -> dict[str, Any]:
    """Return a parameter's properties that no layout changes; every element must exist once."""
    entries = reader.index.entries(name)
    return {
        "shape": sorted({entry.part.whole for entry in entries}),
        "kinds": sorted({tuple(sorted(entry.kinds)) for entry in entries}),
        "elements": sum(entry.numel for entry in entries),
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _of_scalars(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return differences of counters, loss scaling and steps; a layout may lack loss scaling."""
    lines = []
    for section, values in before.items():
        common = values.keys() & after[section].keys()
        if section != "loss_scaling" and common != values.keys() | after[section].keys():
            lines.append(f"{section}: {sorted(values)}, then {sorted(after[section])}")
        lines += [
            f"{section}.{key}: {values[key]}, then {after[section][key]}"
            for key in sorted(common)
            if values[key] != after[section][key]
        ]
    return lines


@dataclass(frozen=True)
class Apart:
    """Relative difference of two trajectories at the worst step; 0 only if bit-equal."""

    loss: float
    norm: float

    def exceeds(self, limit: Apart) -> list[str]:
        """Return the names of quantities that differ by more than allowed or are not numbers."""
        return [name for name in vars(self) if not getattr(self, name) <= getattr(limit, name)]

    @classmethod
    def worst(cls, several: list[Apart]) -> Apart:
        """Return the largest difference of each quantity."""
        return cls(max(a.loss for a in several), max(a.norm for a in several))


def apart(trajectory: dict[str, Any], reference: dict[str, Any], across: bool = False) -> Apart:
    """Return the difference of losses and gradient norms of two recorded trajectories.

    `across` layouts, norms of steps that doubled fp16's loss scale are ignored: DeepSpeed's ZeRO 3
    already divides by the new scale and reports half the norm.
    """
    assert len(trajectory["losses"]) == len(reference["losses"]) > 0
    grown = {i for i, (was, now) in enumerate(pairwise(reference["scales"]), 1) if was != now}
    kept = [i for i in range(len(reference["norms"])) if not (across and i in grown)]
    norms = ([trip["norms"][i] for i in kept] for trip in (trajectory, reference))
    return Apart(_worst(trajectory["losses"], reference["losses"]), _worst(*norms))


def _worst(some: list[str], others: list[str]) -> float:
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(some, others, strict=True)]
    relative = [0.0 if a == b else abs(a - b) / max(abs(b), 1e-30) for a, b in pairs]
    return math.nan if any(map(math.isnan, relative)) else max(relative)
