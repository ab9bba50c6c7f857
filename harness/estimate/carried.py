"""Bytes of the states that are carried from a window of text to the next."""

from __future__ import annotations

from collections.abc import Iterator

from harness.estimate.held import ALWAYS, FP32, Held
from harness.estimate.inputs import Inputs


def carried_states(inputs: Inputs) -> Iterator[Held]:
    """Yield the states of all rows of a rank, fp32, and of the window that is computed those before
    and behind it (harness/engine/carried.py).
    """
    if not inputs.carried_numbers:
        return
    window = FP32 * inputs.carried_numbers * inputs.micro_batch
    yield Held("carried states", window * inputs.grad_accum, ALWAYS - {"build"}, "measured")
    yield Held("carried states of a window", 2 * window, frozenset({"forward", "loss"}), "read")
