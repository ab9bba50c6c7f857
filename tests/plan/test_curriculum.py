"""ramp.* in a plan: what it comes to, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.plan.text import describe

RAMP = {"batch_from": 8, "batch_tokens": 100_000}


def plan_of(ramp: dict[str, Any], ranks: int = 1, **sections: dict[str, Any]) -> Plan:
    run = RunConfig.model_validate({"ramp": ramp, **sections})
    return make_plan(run, {}, World(world_size=ranks, local_world_size=ranks))


def test_the_micro_batch_fits_the_smallest_step() -> None:
    plan = plan_of({**RAMP, "batch_from": 12}, ranks=4)
    assert (plan.micro_batch, plan.grad_accum) == (3, 4)
    assert "from 12 samples a step by 12 to 48 over 100,000 tokens" in describe(plan)


def test_steps_of_a_run_in_tokens_count_the_ramp() -> None:
    tokens = {"tokens": 128 * 8 * 10}
    assert plan_of({}, train=tokens).steps == 2
    assert plan_of(RAMP, train=tokens).steps == 10


def test_sequences_grow_by_doubling() -> None:
    plan = plan_of({"length_from": 16, "length_tokens": 128 * 300})
    assert [plan.curriculum.at(samples).pieces for samples in (0, 100, 200, 300)] == [8, 4, 2, 1]
    assert "from sequences of 16 tokens, doubling, to 128" in describe(plan)


@pytest.mark.parametrize(
    ("ramp", "ranks", "message"),
    [
        ({"batch_from": 8}, 1, "ramp.batch_from is 8 (default), but not ramp.batch_tokens"),
        ({"length_tokens": 8}, 1, "but not ramp.length_from"),
        ({"batch_step": 8}, 1, "ramp.batch_from is not given"),
        ({**RAMP, "batch_from": 48}, 1, "it must be less than train.global_batch, which is 48"),
        ({**RAMP, "batch_step": 9}, 1, "set that to 44 or 53"),
        ({**RAMP, "batch_from": 6}, 4, "multiples of 6 samples"),
        ({"length_from": 24, "length_tokens": 9}, 1, "one of 64, 32, 16, 8, 4, 2"),
    ],
)
def test_what_does_not_go_up_is_refused(ramp: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(ramp, ranks)
    assert message in "\n".join(error.value.problems)


def test_accumulation_that_the_first_steps_cannot_have_is_refused() -> None:
    run = RunConfig.model_validate({"ramp": RAMP, "train": {"global_batch": 64}})
    with pytest.raises(ConfigError) as error:
        make_plan(run, {"gradient_accumulation_steps": 2}, World())
    assert "micro-batches of 32 samples" in error.value.problems[0]
    assert "set it to 8 or more" in error.value.problems[0]


def test_a_run_that_ends_within_its_ramp_is_told_so() -> None:
    described = describe(plan_of({**RAMP, "length_from": 32, "length_tokens": 10**9}))
    assert "its last step reads 48 samples in sequences of 32 tokens" in described
    assert "ends within" not in describe(plan_of({**RAMP, "batch_tokens": 1000}))


def test_a_micro_batch_larger_than_the_smallest_step_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(RAMP, 2, train={"micro_batch": 8})
    assert "4 at least under ramp" in "\n".join(error.value.problems)
