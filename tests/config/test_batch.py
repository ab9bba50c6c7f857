"""Batch arithmetic."""

from __future__ import annotations

import pytest

from harness.config.batch import Batch


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
