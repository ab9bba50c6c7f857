"""The peak against micro-batch and against sequence length."""

from __future__ import annotations

from dataclasses import replace

from harness.estimate.fit import with_micro_batch
from harness.estimate.inputs import Inputs
from harness.estimate.timeline import Estimate, estimate_memory

_POINTS = 7  # each twice the one before
_SHORTEST = 512  # tokens

Curve = list[tuple[int, int]]
"""(micro-batch or tokens, bytes at the peak)."""


def by_micro_batch(estimate: Estimate) -> Curve:
    """Peaks for 1, 2, 4, ... samples at once, and the run's own."""
    inputs = estimate.inputs
    values = {2**power for power in range(_POINTS)} | {inputs.micro_batch}
    return [(n, _peak(with_micro_batch(inputs, n))) for n in sorted(values)]


def by_seq_len(estimate: Estimate) -> Curve:
    """Peaks for 512, 1,024, ... tokens, and the run's own length."""
    inputs = estimate.inputs
    values = {_SHORTEST * 2**power for power in range(_POINTS)} | {inputs.seq_len}
    whole = (n for n in sorted(values) if n % inputs.grid.sequence == 0)
    return [(n, _peak(replace(inputs, seq_len=n))) for n in whole]


def _peak(inputs: Inputs) -> int:
    return estimate_memory(inputs).worst.peak
