"""Divisions over tensor- and sequence-parallel ranks that can be run."""

from __future__ import annotations

from harness.estimate.inputs import Inputs
from harness.layout.division import tensor_problems
from harness.layout.sequence import sequence_problems

_TENSOR, _SEQUENCE = "tensor_parallel.autotp_size", "sequence_parallel_size"


def division_problems(inputs: Inputs) -> list[str]:
    """Return the reasons why a division over ranks cannot be run."""
    grid, shape = inputs.grid, inputs.shape
    sizes = {"pipeline.stages": grid.pipeline, _TENSOR: grid.tensor, _SEQUENCE: grid.sequence}
    used = [f"{key} {size}" for key, size in sizes.items() if size > 1]
    problems = []
    if grid.pipeline > 1 and grid.sequence > 1:
        problems.append(f"{' and '.join(used)}: not built together")
    problems += [
        f"{_TENSOR} is {grid.tensor}: {why}" for why in tensor_problems(shape, grid.tensor)
    ]
    problems += [
        f"{_SEQUENCE} is {grid.sequence}: {why}"
        for why in sequence_problems(shape, grid.sequence, inputs.seq_len, grid.tensor)
    ]
    return problems
