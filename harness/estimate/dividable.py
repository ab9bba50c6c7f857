"""Checks which divisions over ranks are supported."""

from __future__ import annotations

from harness.estimate.inputs import Inputs
from harness.layout.exclusions import KEYS, incompatible_axes, sequence_problems
from harness.layout.tensor import tensor_problems


def division_problems(inputs: Inputs) -> list[str]:
    """Return the reasons why a division over ranks is not supported."""
    grid, shape, seq_len = inputs.grid, inputs.shape, inputs.seq_len
    axes = {key: axis for axis, key in KEYS.items()}
    problems = [
        f"{key} is {getattr(grid, axes[key])}: {why}; {use}"
        for key, why, use in incompatible_axes(shape, grid, seq_len)
    ]
    tensor = tensor_problems(shape, grid.tensor)
    problems += [f"{KEYS['tensor']} is {grid.tensor}: {why}" for why in tensor]
    sequence = sequence_problems(shape, grid.sequence, seq_len, 1 if tensor else grid.tensor)
    return problems + [f"{KEYS['sequence']} is {grid.sequence}: {why}" for why in sequence]
