"""Schedules against their closed forms; batch arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from harness.lr_and_batch import DECAYS, Batch, Schedule


@pytest.mark.parametrize("name", DECAYS)
def test_warmup_is_linear_from_the_first_step_and_ends_at_the_maximum(name: str) -> None:
    schedule = Schedule(name, 1e-3, total_steps=100, warmup_steps=10)
    assert [schedule.lr(step) for step in range(1, 11)] == pytest.approx(
        [1e-4 * step for step in range(1, 11)]
    )
    assert max(schedule.lr(step) for step in range(1, 200)) == pytest.approx(1e-3)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_decays_fall_to_the_floor_at_the_last_step_and_stay(name: str) -> None:
    schedule = Schedule(name, 1e-3, total_steps=100, warmup_steps=10, min_lr_ratio=0.1)
    rates = [schedule.lr(step) for step in range(10, 101)]
    assert all(later <= earlier for earlier, later in pairwise(rates))
    assert schedule.lr(99) > 1.001e-4
    assert schedule.lr(100) == pytest.approx(1e-4)
    assert schedule.lr(1000) == pytest.approx(1e-4)


def test_middles() -> None:
    assert Schedule("constant", 1e-3, total_steps=10).lr(10) == 1e-3
    assert Schedule("linear", 1e-3, 110, 10, min_lr_ratio=0.0).lr(60) == pytest.approx(5e-4)
    assert Schedule("cosine", 1e-3, 110, 10, min_lr_ratio=0.0).lr(35) == pytest.approx(
        5e-4 * (1 + math.cos(math.pi / 4))
    )
    wsd = Schedule("wsd", 1e-3, 100, 10, min_lr_ratio=0.0, decay_fraction=0.2)
    assert wsd.lr(80) == 1e-3
    assert wsd.lr(90) == pytest.approx(5e-4)


def test_a_run_shorter_than_its_warmup_never_reaches_the_maximum() -> None:
    schedule = Schedule("cosine", 1e-3, total_steps=5, warmup_steps=10)
    assert [schedule.lr(step) for step in range(1, 6)] == pytest.approx(
        [1e-4, 2e-4, 3e-4, 4e-4, 5e-4]
    )


def test_bad_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'cosin': one of constant, linear"):
        Schedule("cosin", 1e-3, 10)
    with pytest.raises(ValueError, match="count from 1, not 0"):
        Schedule("cosine", 1e-3, 10).lr(0)


def test_logarithmic_warmup_is_steep_first_and_ends_at_the_maximum_too() -> None:
    schedule = Schedule("constant", 1e-3, 100, warmup_steps=9, warmup_type="log")
    assert schedule.lr(1) == pytest.approx(1e-3 * math.log(2) / math.log(10))
    assert [schedule.lr(step) for step in (9, 10, 100)] == pytest.approx([1e-3] * 3)
    rates = [schedule.lr(step) for step in range(1, 10)]
    gains = [later - earlier for earlier, later in pairwise(rates)]
    assert all(0 < later < earlier for earlier, later in pairwise(gains))


@pytest.mark.parametrize(
    ("global_batch", "data_ranks", "expected"),
    [(48, 1, 8), (48, 2, 8), (48, 4, 6), (14, 1, 7), (13, 1, 1), (3, 1, 3), (1000, 8, 5)],
)
def test_default_micro_batch_is_the_largest_divisor_up_to_8(
    global_batch: int, data_ranks: int, expected: int
) -> None:
    batch = Batch.divided(global_batch, data_ranks, None, None)
    assert batch.micro_batch == expected
    assert batch.grad_accum * expected * data_ranks == batch.global_batch == global_batch


def test_what_is_given_is_kept() -> None:
    assert Batch.divided(48, 2, 4, None) == Batch(48, 4, 6)
    assert Batch.divided(48, 2, None, 4) == Batch(48, 6, 4)
    assert Batch.divided(48, 2, 4, 6) == Batch(48, 4, 6)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((48, 2, 5, None), r"micro_batch = 5 .* 24 samples .* are 4 and 6"),
        ((48, 2, 100, None), r"micro_batch = 100 .* are 12 and 24"),
        ((48, 2, None, 5), r"gradient_accumulation_steps = 5 .* are 4 and 6"),
        ((48, 2, 3, 2), r"= 2, but train\.global_batch 48 = .* 3 x 2 data ranks x 8: set it to 8"),
        ((50, 8, None, None), r"global_batch = 50 .* 8 data ranks: .* 48 or 56"),
        ((3, 8, None, None), r"global_batch = 3 .* 8 data ranks: .* do are 8"),
    ],
)
def test_batches_that_do_not_multiply_name_the_nearest_that_do(
    given: tuple[int, int, int | None, int | None], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        Batch.divided(*given)
