"""Schedules of learning rate, batch and length, against their definitions."""

import math
from itertools import islice, pairwise

import pytest

from harness.config.batch import Curriculum, Slice
from harness.config.optim_and_schedule import DECAYS, OptimConfig, Schedule

# GPT-3's: 32k tokens to 3.2M over 12 billion, in samples of 2,048 (arXiv 2005.14165, table 2.1).
GPT3 = Curriculum(1600, batch_from=16, batch_samples=12 * 10**9 // 2048)
SMALL = Curriculum(20, batch_from=4, batch_step=8, batch_samples=50)
CURRICULA = [Curriculum(48), GPT3, SMALL, Curriculum(6, 2, 1, 7), Curriculum(8, 4, 4, 1)]


def schedule_of(
    name: str, lr: float, total_steps: int, warmup_steps: int = 0, **settings: object
) -> Schedule:
    section = {"schedule": name, "lr": lr, "warmup_steps": warmup_steps, **settings}
    return Schedule(OptimConfig.model_validate(section), total_steps)


@pytest.mark.parametrize("name", DECAYS)
def test_linear_warmup_starts_at_step_1_and_ends_at_the_maximum(name: str) -> None:
    schedule = schedule_of(name, 1e-3, total_steps=11, warmup_steps=10)
    assert [schedule.lr(step) for step in range(1, 11)] == pytest.approx(
        [1e-4 * step for step in range(1, 11)]
    )
    assert max(schedule.lr(step) for step in range(1, 200)) == pytest.approx(1e-3)


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize(("ratio", "steps"), [(0.03, 3), (0.07, 7), (0.005, 1), (0.0, 0)])
def test_a_warm_up_may_be_a_share_of_the_run(name: str, ratio: float, steps: int) -> None:
    section = OptimConfig.model_validate({"schedule": name, "lr": 1e-3, "warmup_ratio": ratio})
    of_steps = schedule_of(name, 1e-3, 100, warmup_steps=steps)
    assert Schedule(section, 100).warmup == steps
    at = (1, 50, 100)
    assert [Schedule(section, 100).lr(n) for n in at] == [of_steps.lr(n) for n in at]


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd", "polynomial"])
def test_decays_fall_to_the_floor_at_the_last_step_and_stay(name: str) -> None:
    schedule = schedule_of(name, 1e-3, total_steps=100, warmup_steps=10, min_lr_ratio=0.1)
    rates = [schedule.lr(step) for step in range(10, 101)]
    assert all(later <= earlier for earlier, later in pairwise(rates))
    assert schedule.lr(99) > 1.001e-4
    assert schedule.lr(100) == pytest.approx(1e-4)
    assert schedule.lr(1000) == pytest.approx(1e-4)


def test_schedule_values_halfway() -> None:
    assert schedule_of("constant", 1e-3, total_steps=10).lr(10) == 1e-3
    assert schedule_of("linear", 1e-3, 110, 10, min_lr_ratio=0.0).lr(60) == pytest.approx(5e-4)
    assert schedule_of("cosine", 1e-3, 110, 10, min_lr_ratio=0.0).lr(35) == pytest.approx(
        5e-4 * (1 + math.cos(math.pi / 4))
    )
    wsd = schedule_of("wsd", 1e-3, 100, 10, min_lr_ratio=0.0, decay_fraction=0.2)
    assert wsd.lr(80) == 1e-3
    assert wsd.lr(90) == pytest.approx(5e-4)


def test_polynomials_fall_by_their_power() -> None:
    schedule = schedule_of("polynomial", 1e-3, 110, 10, min_lr_ratio=0.1, power=3.0)
    for step in (10, 35, 60, 110, 200):
        share = (1 - min(1.0, (step - 10) / 100)) ** 3
        assert schedule.lr(step) == pytest.approx(1e-3 * (0.1 + 0.9 * share))
    linear = schedule_of("linear", 1e-3, 110, 10)
    first_power = schedule_of("polynomial", 1e-3, 110, 10, min_lr_ratio=0.1, power=1.0)
    assert [first_power.lr(s) for s in (10, 50)] == [linear.lr(s) for s in (10, 50)]


def test_inverse_sqrt_decay_ignores_run_length() -> None:
    for total in (100, 10**6):
        schedule = schedule_of("inverse_sqrt", 1e-3, total, warmup_steps=16, min_lr_ratio=0.01)
        rates = [schedule.lr(step) for step in (8, 16, 64, 1600)]
        assert rates == pytest.approx([5e-4, 1e-3, 5e-4, 1e-4])
        assert schedule.lr(10**9) == pytest.approx(1e-5)
    at_once = schedule_of("inverse_sqrt", 1e-3, 100, min_lr_ratio=0.01)
    assert [at_once.lr(step) for step in (1, 4)] == pytest.approx([1e-3, 5e-4])


@pytest.mark.parametrize(("cycles", "growth", "first"), [(1, 1, 100), (4, 1, 25), (2, 3, 25)])
def test_warm_restarts_are_torchs(cycles: int, growth: int, first: int) -> None:
    import torch
    from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

    how = {"min_lr_ratio": 0.1, "cycles": cycles, "cycle_growth": float(growth)}
    schedule = schedule_of("cosine_restarts", 1e-3, 110, 10, **how)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    theirs = CosineAnnealingWarmRestarts(optimizer, first, growth, eta_min=1e-4)
    for step in range(10, 110):
        assert schedule.lr(step) == pytest.approx(theirs.get_last_lr()[0]), step
        optimizer.step()
        theirs.step()
    assert schedule.lr(110) == schedule.lr(500) == pytest.approx(1e-4)  # the end, not a new cycle


def test_a_run_shorter_than_its_warmup_never_reaches_the_maximum() -> None:
    schedule = schedule_of("cosine", 1e-3, total_steps=5, warmup_steps=10)
    assert [schedule.lr(step) for step in range(1, 6)] == pytest.approx(
        [1e-4, 2e-4, 3e-4, 4e-4, 5e-4]
    )


def test_steps_count_from_1() -> None:
    with pytest.raises(ValueError, match="count from 1, not 0"):
        schedule_of("cosine", 1e-3, 10).lr(0)


def test_log_warmup_is_steep_first_and_ends_at_the_maximum() -> None:
    schedule = schedule_of("constant", 1e-3, 100, warmup_steps=9, warmup_type="log")
    assert schedule.lr(1) == pytest.approx(1e-3 * math.log(2) / math.log(10))
    assert [schedule.lr(step) for step in (9, 10, 100)] == pytest.approx([1e-3] * 3)
    rates = [schedule.lr(step) for step in range(1, 10)]
    gains = [later - earlier for earlier, later in pairwise(rates)]
    assert all(0 < later < earlier for earlier, later in pairwise(gains))


def test_run_without_ramp_has_equal_steps() -> None:
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
def test_token_sums_of_ramp_equal_the_sums_over_steps(curriculum: Curriculum) -> None:
    steps = 3000
    walked = list(islice(curriculum.walk(0), steps))
    for count in (0, 1, 2, 5, 100, steps - 1):
        assert curriculum.samples_after(count) == walked[count].first_sample
    for number in (0, 1, 4, 50):
        end = walked[number].first_sample + walked[number].global_batch
        assert curriculum.steps_for(end) == number + 1
        assert curriculum.steps_for(end + 1) == number + 2
        assert curriculum.steps_for(end - 1) == number + 1


def test_ramp_that_does_not_advance_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Curriculum, "_steps_at_this_batch", lambda self, samples: 0)
    with pytest.raises(AssertionError, match=r"no step advances .* from sample 4"):
        SMALL.samples_after(1, samples=4)
    with pytest.raises(AssertionError, match=r"no step advances .* from sample 0"):
        SMALL.steps_for(1)


@pytest.mark.parametrize("curriculum", CURRICULA)
def test_every_batch_is_a_multiple_of_the_quantum(curriculum: Curriculum) -> None:
    batches = {step.global_batch for step in islice(curriculum.walk(0), 2000)}
    assert all(batch % curriculum.quantum == 0 for batch in batches)


def test_sequences_double() -> None:
    growing = Curriculum(4, most_pieces=8, length_samples=30)
    pieces = [step.pieces for step in islice(growing.walk(0), 9)]
    assert pieces == [8, 8, 8, 4, 4, 2, 2, 2, 1]
