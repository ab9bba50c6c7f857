"""Defaults for given weights, adapters, and 4-bit weights."""

from __future__ import annotations

import json

import pytest

from harness.config.assignments import BY_SIZE
from harness.errors import ConfigError
from harness.plan.model import with_rows_for
from harness.plan.model_config import find_model_config
from harness.plan.plan import Plan
from tests.engine.small import MODEL
from tests.plan.conftest import Packages
from tests.plan.plans import Planner

NF4 = "model.lora.quantize=nf4"
SHORT = "data.seq_len=16 train.global_batch=8"


@pytest.fixture
def start(planned: Planner) -> str:
    """Return the words of a run that starts from given weights."""
    return f"{SHORT} model.init_from={planned.add('weights', MODEL).parent}"


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("", 3),
        ("optim.lr=2e-3", 3),  # a key of the user's restores no other default
        ("optim.lr=2e-3 optim.schedule=linear train.steps=40", 3),
        ("optim.warmup_steps=7", 7),
        ("optim.warmup_ratio=0.1", 10),
        ("ds.scheduler.type=WarmupLR ds.scheduler.params.warmup_num_steps=5", 5),
    ],
)
def test_the_warm_up_is_a_share_of_the_run(
    words: str, steps: int, start: str, planned: Planner
) -> None:
    made = planned(f"{start} {words}", estimate=False)
    assert made.schedule(100).warmup == steps
    assert made.schedule(100).lr(steps) == pytest.approx(made.config.optim.lr)


def test_random_weights_keep_their_defaults(planned: Planner) -> None:
    made = planned(SHORT, estimate=False)
    assert (made.config.optim.lr, made.steps) == (3e-3, 100)
    assert made.config.origin("optim.lr") == "default"
    by_size = planned("model.name=llama-3-8b", estimate=False)
    assert by_size.config.origin("optim.lr") == BY_SIZE


def test_adapters_are_counted_in_the_plan(start: str, planned: Planner) -> None:
    made = planned(f"{start} model.lora.rank=4")
    inputs = made.estimate.inputs
    assert (inputs.trained, inputs.frozen) == (6144, sum(t.numel for t in inputs.shape.tensors()))
    assert json.loads(json.dumps(made.to_json()))["run"]["model"]["lora"]["rank"] == 4


def test_a_missing_package_is_named_with_the_command(
    start: str, planned: Planner, packages: Packages
) -> None:
    packages("bitsandbytes", none=True)
    (problem,) = planned.problems(f"{start} model.lora.rank=4 {NF4}")
    assert "pip install bitsandbytes" in problem


def test_7b_in_4_bits_fits_24_gib(planned: Planner) -> None:
    def gib(plan: Plan, component: str) -> float:
        parts = [part for part in plan.estimate.worst.parts if part.component == component]
        return sum(part.bytes for part in parts) / 2**30

    weights = planned.add("seven_b", find_model_config("llama-2-7b")[0]).parent
    words = f"{SHORT} model.init_from={weights} model.lora.rank=16"
    lora, qlora = planned(words), planned(f"{words} {NF4}")
    assert gib(lora, "dequantized weight") == 0
    # 6.48e9 weights at 4.127 bits (QLoRA, section 3); 0.26e9 and the adapters unchanged.
    count = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    saved = count * (4 * 8 / 8 - bits / 8) / 2**30  # fp32 on CPUs
    assert gib(lora, "parameters") - gib(qlora, "parameters") == pytest.approx(saved, rel=1e-3)
    assert gib(qlora, "dequantized weight") == pytest.approx(4096 * 11008 * 4 / 2**30, rel=0.02)


def test_the_checkpoints_of_a_run_get_no_new_rows(planned: Planner) -> None:
    """Not even for a larger tokenizer, which is known once the data is read; the run's export gets
    them.
    """
    run = planned.add("run", MODEL).parent
    given = f"{SHORT} model.init_from={run}"
    assert planned(f"{given} model.overrides.vocab_size=90", estimate=False)
    plan = planned(given, estimate=False)
    assert with_rows_for(plan, 90).model_config["vocab_size"] == 90
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    why = "whose checkpoints have 64 vocabulary rows, but 90 are needed"
    (problem,) = planned.problems(f"{given} model.overrides.vocab_size=90")
    assert problem.endswith(f"{why}: set model.init_from=$run/export")
    with pytest.raises(ConfigError, match=why):
        with_rows_for(plan, 90)
    assert with_rows_for(plan, 64) is plan
