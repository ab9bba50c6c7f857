"""Two checkpoints, tensor by tensor; two trajectories, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from harness.checkpoint.find import Checkpoint
from harness.checkpoint.reader import Reader
from harness.errors import Unusable


def differences(first: Checkpoint, second: Checkpoint, turn: int, turns: int) -> list[str]:
    """What the second checkpoint has otherwise; of its tensors every `turns`-th is looked at."""
    one, other = first.reader(), second.reader()
    names = sorted(one.by_name.keys() | other.by_name.keys())
    found = [line for name in names[turn::turns] for line in _of_tensor(name, one, other)]
    return found + _of_scalars(first.manifest.engine, second.manifest.engine)


def _of_tensor(name: str, one: Reader, other: Reader) -> list[str]:
    known = [_known(reader, name) for reader in (one, other)]
    if known[0] != known[1]:
        return [f"{name}: {known[0]}, then {known[1]}"]
    found = []
    for kind in known[0]["kinds"][0]:
        try:
            before, after = whole(one, name, kind), whole(other, name, kind)
        except Unusable as error:
            found.append(str(error))
            continue
        unequal = (_bits(before) != _bits(after)) if before.dtype == after.dtype else None
        if unequal is None or bool(unequal.any()):
            how_many = "all of" if unequal is None else f"{int(unequal.sum())} bytes of"
            found.append(f"{how_many} {name}/{kind} {list(before.shape)} {before.dtype} differ")
    return found


def whole(reader: Reader, name: str, kind: str) -> torch.Tensor:
    """One tensor of a checkpoint; defects that are planted in reading leave this alone."""
    return reader.whole(name, kind)


def _known(reader: Reader, name: str) -> dict[str, Any]:
    """What does not depend on how a parameter was cut: every element is there once."""
    entries = reader.by_name.get(name, [])
    return {
        "shape": sorted({entry.shape for entry in entries}),
        "kinds": sorted({tuple(sorted(entry.kinds)) for entry in entries}),
        "elements": sum(entry.numel for entry in entries),
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _of_scalars(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Counters, loss scaling and steps; a layout without loss scaling has nothing to say of it."""
    found = []
    for section, values in before.items():
        common = values.keys() & after[section].keys()
        if section != "loss_scaling" and common != values.keys() | after[section].keys():
            found.append(f"{section}: {sorted(values)}, then {sorted(after[section])}")
        found += [
            f"{section}.{key}: {values[key]}, then {after[section][key]}"
            for key in sorted(common)
            if values[key] != after[section][key]
        ]
    return found


@dataclass(frozen=True)
class Apart:
    """Return the relative difference of two trajectories at the worst step; 0 only if bit-equal."""

    loss: float
    norm: float

    def exceeds(self, limit: Apart) -> list[str]:
        """Names of what is further apart than allowed, or no number."""
        return [name for name in vars(self) if not getattr(self, name) <= getattr(limit, name)]

    @classmethod
    def worst(cls, several: list[Apart]) -> Apart:
        """The largest of each."""
        return cls(max(a.loss for a in several), max(a.norm for a in several))


def apart(one: dict[str, Any], other: dict[str, Any], across: bool = False) -> Apart:
    """Losses and gradient norms of two trajectories, as they are kept.

    `across` layouts a norm counts not in a step that doubled fp16's loss scale: DeepSpeed's ZeRO-3
    divides it by the new scale already, and reports half of it.
    """
    assert len(one["losses"]) == len(other["losses"]) > 0
    grown = {i for i, (was, now) in enumerate(pairwise(other["scales"]), 1) if was != now}
    kept = [i for i in range(len(other["norms"])) if not (across and i in grown)]
    norms = ([trip["norms"][i] for i in kept] for trip in (one, other))
    return Apart(_worst(one["losses"], other["losses"]), _worst(*norms))


def _worst(some: list[str], others: list[str]) -> float:
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(some, others, strict=True)]
    found = [0.0 if a == b else abs(a - b) / max(abs(b), 1e-30) for a, b in pairs]
    return math.nan if any(map(math.isnan, found)) else max(found)
