from typing import Any

import numpy as np
import pytest
import torch

from harness.checkpoint.manifest import TrainState
from harness.config.run_file import load_run_config
from harness.data.batch import Batch
from harness.data.batches import Stream
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.steps import Steps, dropout_seed

STEPS = 6


class Numbers(Stream):
    """Samples that hold their own number; every third has no target."""

    document_mask = False
    seq_len = 1

    def __init__(self) -> None:
        pass

    def targets_in(self, first_sample: int, count: int) -> int:
        return sum(number % 3 > 0 for number in range(first_sample, first_sample + count))

    def _read(self, samples: Any) -> Batch:
        ids = torch.from_numpy(np.asarray(samples))[:, None]
        return Batch(ids, ids, None)


def steps(rank: int = 0, ranks: int = 1, *words: str) -> Steps:
    words = ("train.global_batch=8", "train.micro_batch=2", f"train.steps={STEPS}", *words)
    plan = make_plan(load_run_config(None, words), {}, World(rank, ranks, rank, ranks))
    return Steps(plan, Numbers(), STEPS)


def taken(steps: Steps) -> list[Any]:
    """Return (number, samples, targets, rate, seed) of all remaining steps."""
    taken = []
    while steps.are_left:
        step = steps.take()
        ids = [n for batch in step.batches for n in batch.input_ids.flatten().tolist()]
        taken.append((step.number, ids, step.targets, step.lr, step.dropout_seed))
        steps.done(step)
    steps.close()
    return taken


def test_all_steps_together_read_every_sample_once() -> None:
    whole = taken(steps())
    assert [number for number, *_ in whole] == list(range(1, STEPS + 1))
    assert [n for _, ids, *_ in whole for n in ids] == list(range(8 * STEPS))
    assert [targets for _, _, targets, *_ in whole][:3] == [5, 5, 6]


def test_ranks_share_samples_and_rates_but_no_dropout() -> None:
    first, second = taken(steps(0, 2)), taken(steps(1, 2))
    both = zip(first, second, strict=True)
    for (_, mine, targets, lr, seed), (_, theirs, *same, other_seed) in both:
        assert not {*mine} & {*theirs}
        assert len({*mine, *theirs}) == 8
        assert [targets, lr] == same
        assert seed != other_seed


def test_steps_go_on_from_any_state_as_if_they_had_never_stopped() -> None:
    whole, resumed = taken(steps()), steps()
    resumed.move(TrainState(2, 16, 16 * 128))
    assert taken(resumed) == whole[2:]


def test_steps_go_back_past_samples_that_were_thrown_away() -> None:
    going = steps()
    for _ in range(3):
        going.done(going.take())
    going.take()
    going.move(TrainState(1, 40, 40 * 128))
    step = going.take()
    assert (step.number, step.reads.samples) == (2, [40, 48])
    assert step.batches[0].input_ids.flatten().tolist() == [40, 41]
    going.close()


def test_a_seed_is_a_function_of_seed_step_and_rank() -> None:
    seeds = {dropout_seed(*place) for place in ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1))}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert dropout_seed(0, 1, 0) == dropout_seed(0, 1, 0)


@pytest.mark.parametrize("total", [0, 3])
def test_steps_end_at_the_total(total: int) -> None:
    short = steps()
    short.total = total
    assert len(taken(short)) == total
