"""Matrix products: bound by their operations where they are large, by their bytes elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.estimate.step_time.layer import TILE, product_seconds
from harness.estimate.step_time.machine import machine_of

A100 = machine_of("a100-80", 8, "bf16")


def test_a_large_product_reaches_the_share_of_the_peak() -> None:
    size = TILE * A100.multiprocessors
    seconds = product_seconds(size, size, size, 2, A100) - A100.kernel_seconds
    assert 2 * size**3 / seconds == pytest.approx(A100.peak_flops * A100.products)


def test_a_vector_is_bound_by_the_bytes_of_the_matrix() -> None:
    columns = TILE * A100.multiprocessors
    seconds = product_seconds(1, columns, 8192, 2, A100)
    moved = columns * 8192 + columns + 8192
    assert seconds == pytest.approx(2 * moved / A100.memory_rate + A100.kernel_seconds)


def test_one_tile_more_than_a_wave_takes_two_waves() -> None:
    rows, columns = TILE * 12, TILE * 9
    assert A100.multiprocessors == 12 * 9
    one = product_seconds(rows, columns, 8192, 2, A100) - A100.kernel_seconds
    two = product_seconds(rows + 1, columns, 8192, 2, A100) - A100.kernel_seconds
    assert two == pytest.approx(2 * one)


def test_kernels_that_share_the_last_wave_lose_less_in_it() -> None:
    machine = replace(A100, partial_wave=0.25, kernel_seconds=0.0)
    rows, columns = TILE * 12, TILE * 9  # a whole wave, and a quarter of another
    one = product_seconds(rows, columns, 8192, 2, machine)
    quarter = product_seconds(rows + TILE * 3, columns, 8192, 2, machine)
    assert quarter == pytest.approx((1.25 + 0.25 * 0.75) * one)
