"""Batch and length as functions of the samples consumed, against their definition step by step."""

from __future__ import annotations

from itertools import islice

import pytest

from harness.config.curriculum import Curriculum, Slice

# GPT-3's: 32k tokens to 3.2M over 12 billion, in samples of 2,048 (arXiv 2005.14165, table 2.1).
GPT3 = Curriculum(1600, batch_from=16, batch_samples=12 * 10**9 // 2048)
SMALL = Curriculum(20, batch_from=4, batch_step=8, batch_samples=50)
CURRICULA = [Curriculum(48), GPT3, SMALL, Curriculum(6, 2, 1, 7), Curriculum(8, 4, 4, 1)]


def test_a_run_without_one_has_equal_steps() -> None:
    plain = Curriculum(48)
    assert list(islice(plain.walk(96), 2)) == [Slice(96, 48), Slice(144, 48)]
    assert (plain.samples_after(7), plain.steps_for(7 * 48 + 1)) == (7 * 48, 8)


def test_the_batch_rises_in_equal_parts() -> None:
    batches = [step.global_batch for step in islice(SMALL.walk(0), 11)]
    # Two rises over 50 samples: at the first step that begins at or after 25, and after 50.
    assert batches == [4] * 7 + [12] * 2 + [20] * 2
    assert 6 * 4 < 25 <= 7 * 4
    assert 7 * 4 + 12 < 50 <= 7 * 4 + 2 * 12


def test_gpt3s_ramp_begins_and_ends_where_the_paper_says() -> None:
    assert GPT3.at(0).global_batch * 2048 == 32_768
    assert GPT3.at(12 * 10**9 // 2048).global_batch * 2048 == 3_276_800
    halfway = GPT3.at(6 * 10**9 // 2048).global_batch
    assert halfway == pytest.approx(808, abs=16)


@pytest.mark.parametrize("curriculum", CURRICULA)
def test_sums_are_those_of_the_steps(curriculum: Curriculum) -> None:
    steps = 3000
    walked = list(islice(curriculum.walk(0), steps))
    for count in (0, 1, 2, 5, 100, steps - 1):
        assert curriculum.samples_after(count) == walked[count].first_sample
    for number in (0, 1, 4, 50):
        end = walked[number].first_sample + walked[number].global_batch
        assert curriculum.steps_for(end) == number + 1
        assert curriculum.steps_for(end + 1) == number + 2
        assert curriculum.steps_for(end - 1) == number + 1


@pytest.mark.parametrize("curriculum", CURRICULA)
def test_every_batch_is_a_multiple_of_the_quantum(curriculum: Curriculum) -> None:
    batches = {step.global_batch for step in islice(curriculum.walk(0), 2000)}
    assert all(batch % curriculum.quantum == 0 for batch in batches)


def test_sequences_double() -> None:
    growing = Curriculum(4, most_pieces=8, length_samples=30)
    pieces = [step.pieces for step in islice(growing.walk(0), 9)]
    assert pieces == [8, 8, 8, 4, 4, 2, 2, 2, 1]
