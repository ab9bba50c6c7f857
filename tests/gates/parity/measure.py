"""A trajectory, and the distance between two of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

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

    def save(self, path: Path) -> None:
        """Write to `path`.json and `path`.safetensors."""
        tensors = {f"gradient/{n}": t for n, t in self.gradients.items()}
        tensors |= {f"change/{n}": t for n, t in self.sgd_changes.items()}
        save_file({n: t.contiguous() for n, t in tensors.items()}, f"{path}.safetensors")
        numbers = {"losses": self.losses, "norms": self.norms, "held_out": self.held_out}
        Path(f"{path}.json").write_text(json.dumps(numbers))

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """Return the trajectory that `save` wrote."""
        result = cls(**json.loads(Path(f"{path}.json").read_text()))
        for key, tensor in load_file(f"{path}.safetensors").items():
            kind, _, name = key.partition("/")
            (result.gradients if kind == "gradient" else result.sgd_changes)[name] = tensor
        return result


@dataclass(frozen=True)
class Difference:
    """Distance of two trajectories; all are relative except the losses (nats)."""

    initial_loss: float
    gradient: float  # worst parameter: norm of the difference over norm of the reference
    sgd_change: float
    loss: float  # worst step
    norm: float
    held_out: float

    def exceeds(self, tolerance: Difference) -> list[str]:
        """Return the quantities that exceed the tolerance or are not numbers."""
        return [name for name in vars(self) if not getattr(self, name) <= getattr(tolerance, name)]

    def scaled(self, factor: float) -> Difference:
        """Return every quantity times `factor`."""
        return Difference(*(value * factor for value in vars(self).values()))

    @classmethod
    def largest(cls, several: list[Difference]) -> Difference:
        """Return the largest value of each quantity."""
        return cls(
            *(_worst(values) for values in zip(*(vars(d).values() for d in several), strict=True))
        )


def rounding(reference: Trajectory) -> Difference:
    """Return one unit in the last place of fp32: two correct sums can differ by that much, and a
    smaller spread is an accident of a few tries.
    """
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
