"""Micro-batches by length in a plan."""

from __future__ import annotations

import pytest

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.plan.text import summary

ZERO = {"zero_optimization": {"stage": 1}}


def planned(*words: str, ds: dict[str, object] | None = None, ranks: int = 2) -> Plan:
    run = load_run_config(None, words)
    return make_plan(run, ds or ZERO, World(0, ranks, 0, ranks))


def problems(*words: str, ds: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        planned(*words, ds=ds)
    return "\n".join(error.value.problems)


def test_the_budget_is_the_largest_micro_batch_that_is_estimated() -> None:
    budget = planned("data.batching=token_budget", "data.tokens_per_batch=512", "data.seq_len=128")
    plain = planned("train.micro_batch=4", "data.seq_len=128")
    assert budget.micro_batch == budget.config.train.micro_batch == 4
    assert budget.estimate is not None
    assert plain.estimate is not None
    assert budget.estimate.needed == plain.estimate.needed
    assert "as many as fit 512 positions" in summary(budget)
    assert "100 steps = 4,800 documents" in summary(budget)


def test_all_that_needs_samples_of_one_length_is_refused_at_once() -> None:
    stages = {"pipeline": {"stages": 2}}
    text = problems(
        "data.batching=length_grouped",
        "train.tokens=100000",
        "ramp.length_from=32",
        "ramp.length_tokens=1000",
        ds=stages,
    )
    for key in ("pipeline.stages", "ramp.length_from", "train.tokens"):
        assert f"but with {key}" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("data.batching=length_grouped", "data.packing=whole"), "data.packing=whole is for"),
        (("data.tokens_per_batch=256",), "is for data.batching=token_budget"),
        (
            ("data.batching=token_budget", "data.tokens_per_batch=200"),
            "no multiple of data.seq_len = 128, the longest document: set it to 128 or 256",
        ),
        (("data.batching=padded", "data.pool_samples=12"), "no multiple of data.group_samples"),
        (
            ("data.batching=token_budget", "data.tokens_per_batch=256", "train.micro_batch=4"),
            "but train.micro_batch is 4 (command line)",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_named(words: tuple[str, ...], expected: str) -> None:
    assert expected in problems(*words)


def test_a_run_does_not_rehearse_itself() -> None:
    text = problems("run.dir=runs/a", "data.rehearse=runs/../runs/a")
    assert "data.rehearse is 'runs/../runs/a'" in text
    assert "which is run.dir itself: name an earlier run" in text


def test_routers_of_experts_see_padding() -> None:
    mixture = planned("model.name=deepseek-v3", "data.batching=length_grouped")
    assert mixture.config.data.document_mask is True
    assert "routers are not balanced by padding" in summary(mixture)
    assert planned("data.batching=length_grouped").config.data.document_mask is None
