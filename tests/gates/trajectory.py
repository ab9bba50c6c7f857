"""Trajectories of losses, norms and weights, and the distances between two of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file


@dataclass
class Trajectory:
    """The record of one training: losses, norms, gradients, weight changes."""

    losses: list[float] = field(default_factory=list)  # nats; the first is the initial loss
    norms: list[float] = field(default_factory=list)
    held_out: float = math.nan  # nats per target token, after the last step
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # at step 0
    sgd_changes: dict[str, torch.Tensor] = field(default_factory=dict)  # after one SGD step
    units: dict[str, torch.Tensor] = field(default_factory=dict)
    """One unit in the last place of each changed fp32 weight; only for the plain loop."""
    scales: list[float] = field(default_factory=list)
    """Loss scale of each step; only for round trips."""
    differences: list[str] = field(default_factory=list)
    """Differences between two checkpoints of a round trip."""

    def save(self, path: Path) -> None:
        """Write `path`.json, with every bit, and `path`.safetensors if there are tensors."""
        tensors = {f"gradient/{n}": t.contiguous() for n, t in self.gradients.items()}
        tensors |= {f"change/{n}": t.contiguous() for n, t in self.sgd_changes.items()}
        if tensors:
            save_file(tensors, f"{path}.safetensors")
        numbers = {key: value for key, value in vars(self).items() if not isinstance(value, dict)}
        Path(f"{path}.json").write_text(json.dumps(numbers))

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """Return the trajectory that `save` wrote."""
        result = cls(**json.loads(Path(f"{path}.json").read_text()))
        kept = Path(f"{path}.safetensors")
        for key, tensor in (load_file(kept) if kept.exists() else {}).items():
            kind, _, name = key.partition("/")
            (result.gradients if kind == "gradient" else result.sgd_changes)[name] = tensor
        return result


class Distance:
    """Quantities in which two trajectories differ: the fields of a dataclass."""

    def exceeds(self, tolerance: Self) -> list[str]:
        """Return the quantities that exceed the tolerance or are not numbers."""
        return [name for name in vars(self) if not getattr(self, name) <= getattr(tolerance, name)]

    def scaled(self, factor: float) -> Self:
        """Return every quantity times `factor`."""
        return type(self)(*(value * factor for value in vars(self).values()))

    @classmethod
    def largest(cls, several: list[Self]) -> Self:
        """Return the largest value of each quantity."""
        return cls(
            *(_worst(values) for values in zip(*(vars(d).values() for d in several), strict=True))
        )


@dataclass(frozen=True)
class Difference(Distance):
    """Distance of two trajectories; all are relative except the losses (nats)."""

    initial_loss: float
    gradient: float  # worst parameter: norm of the difference over norm of the reference
    sgd_change: float
    loss: float  # worst step
    norm: float
    held_out: float


@dataclass(frozen=True)
class Apart(Distance):
    """Relative difference of two trajectories at the worst step; 0 only if bit-equal."""

    loss: float
    norm: float


def rounding(reference: Trajectory) -> Difference:
    """Return one unit in the last place of fp32: no smaller spread is more than an accident."""
    unit = torch.finfo(torch.float32).eps
    return Difference(
        initial_loss=unit * reference.losses[0],
        gradient=unit,
        sgd_change=unit,
        loss=unit * max(reference.losses),
        norm=unit,
        held_out=unit * reference.held_out,
    )


def difference(trajectory: Trajectory, reference: Trajectory) -> Difference:
    """Return the distance of a trajectory from the reference; both must have the same parameters.

    Raises ValueError with the parameters that only one of them has.
    """
    steps = range(len(reference.losses))
    return Difference(
        initial_loss=abs(trajectory.losses[0] - reference.losses[0]),
        gradient=worst_relative(trajectory.gradients, reference.gradients),
        sgd_change=worst_relative(trajectory.sgd_changes, reference.sgd_changes, reference.units),
        loss=_worst(abs(trajectory.losses[i] - reference.losses[i]) for i in steps),
        norm=_worst(abs(trajectory.norms[i] / reference.norms[i] - 1) for i in steps),
        held_out=abs(trajectory.held_out - reference.held_out),
    )


def apart(trajectory: Trajectory, reference: Trajectory, across: bool = False) -> Apart:
    """Return the relative difference of losses and gradient norms of two trajectories.

    `across` layouts, norms of steps that doubled fp16's loss scale are ignored: DeepSpeed's ZeRO 3
    already divides by the new scale and reports half the norm.
    """
    assert len(trajectory.losses) == len(reference.losses) > 0
    grown = {i for i, (was, now) in enumerate(pairwise(reference.scales), 1) if was != now}
    kept = [i for i in range(len(reference.norms)) if not (across and i in grown)]
    norms = ([each.norms[i] for i in kept] for each in (trajectory, reference))
    return Apart(_relative(trajectory.losses, reference.losses), _relative(*norms))


def _relative(some: list[float], others: list[float]) -> float:
    pairs = zip(some, others, strict=True)
    return _worst(0.0 if a == b else abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)


def unit_of(*weights: torch.Tensor) -> torch.Tensor:
    """Return, for each element, a unit in the last place of the largest of the fp32 weights."""
    largest = torch.stack(weights).abs().amax(0)
    return torch.nextafter(largest, torch.full_like(largest, math.inf)) - largest


def worst_relative(
    ours: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    units: dict[str, torch.Tensor] | None = None,
) -> float:
    """Return the relative norm of the difference for the worst parameter.

    Elements that differ by at most their `units` count as equal: if a weight lies between two
    numbers, two correct sums may round to different ones. Raises ValueError with the parameters
    that only one side has.
    """
    if ours.keys() != reference.keys():
        raise ValueError(f"only in one of the two: {sorted(ours.keys() ^ reference.keys())}")
    distances = []
    for name, true in reference.items():
        apart = ours[name].double() - true.double()
        if units:
            apart = apart.masked_fill(apart.abs() <= units[name].double(), 0)
        distances.append(float(apart.norm() / true.double().norm().clamp_min(1e-30)))
    return _worst(distances)


def _worst(values: Iterable[float]) -> float:
    """Return the largest, or NaN if any is NaN; `max` would depend on their order."""
    listed = list(values)
    return math.nan if any(map(math.isnan, listed)) else max(listed)
