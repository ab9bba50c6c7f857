"""Seconds of a matrix product: its operations, in whole tiles, or the bytes that it moves."""

from __future__ import annotations

from math import ceil

from harness.estimate.step_time.machine import Machine

TILE = 128
"""Rows and columns of the part of a result that one multiprocessor computes at a time."""


def product_seconds(
    rows: float, columns: int, depth: int, element_bytes: int, machine: Machine
) -> float:
    """Return the seconds of (rows x depth) @ (depth x columns).

    Multiprocessors compute tiles in waves, of which the last may be partly empty (NVIDIA, "Matrix
    Multiplication Background User's Guide", sections 3 and 4); a small product takes as long as
    its operands take to be read and its result to be written, and none less than a kernel does
    that has nothing to do. tests/estimate/test_published_throughput.py compares published rates.
    """
    tiles = ceil(rows / TILE) * ceil(columns / TILE)
    full = tiles / machine.multiprocessors
    waves = full + machine.partial_wave * (ceil(full) - full)
    flops = 2 * waves * machine.multiprocessors * TILE * TILE * depth
    moved = element_bytes * (rows * columns + rows * depth + columns * depth)
    computed = flops / (machine.peak_flops * machine.products)
    return max(computed, moved / machine.memory_rate) + machine.kernel_seconds
