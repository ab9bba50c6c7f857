"""What a plan chooses where kernels, compilation and micro-batch are open."""

import importlib.util
from typing import Any

import pytest

from harness.config.ds_json import value_of
from harness.plan import speed
from harness.plan.plan import Plan
from tests.plan.plans import Planner
from tests.tables import beside

LLAMA = "model.name=llama-1b data.seq_len=4096"
H200 = "GPU=h200 ds.bf16.enabled=true ds.zero_optimization.stage=1"


def chosen(plan: Plan) -> tuple[str, bool, int]:
    """Return what the plan has chosen, which its JSON and its estimate must agree with."""
    model, inputs = plan.config.model, plan.estimate.inputs
    assert (inputs.liger, inputs.compiled) == (model.kernels == "liger", model.compile)
    assert plan.micro_batch == inputs.micro_batch
    assert value_of(plan.deepspeed, "train_micro_batch_size_per_gpu") == plan.micro_batch
    return model.kernels, model.compile, plan.micro_batch


@pytest.mark.parametrize(("line", "expected"), beside(__file__, "speed.toml")["chosen"])
def test_plan_chooses_options(line: str, expected: list[Any], planned: Planner) -> None:
    assert [*chosen(planned(line.format(LLAMA=LLAMA, H200=H200)))] == expected


def test_choices_are_said_in_one_line_with_their_gain(planned: Planner) -> None:
    (event,) = [e for e in planned(f"{H200} {LLAMA}").events if e["kind"] == "chosen"]
    start = "model.kernels=liger, train.micro_batch=16: chosen for this model and GPU (auto), MFU "
    assert event["message"].startswith(start)
    (after, before) = event["message"].removeprefix(start).split(" instead of ")
    assert int(after[:-1]) >= 50 > int(before[:-1])


def test_the_choice_fits_with_headroom_and_the_next_does_not(planned: Planner) -> None:
    shares = []
    for size in ("", "train.micro_batch=16"):  # 12 are chosen of 48
        estimate = planned(f"{H200} {LLAMA} model.kernels=none {size}").estimate
        assert estimate.device_bytes is not None
        shares.append(estimate.worst.shown.high / estimate.device_bytes)
    assert shares[0] < 1 - speed.HEADROOM < shares[1]


def test_choices_do_not_bind_a_run_that_goes_on(planned: Planner) -> None:
    plan = planned(f"{H200} {LLAMA}")
    assert not {"model.kernels", "model.compile", "train.micro_batch"} & plan.settled.keys()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, planned: Planner) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(speed, "_is_here", lambda plan: True)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "liger" in name else find(name)
    )
    plan = planned(f"{H200} {LLAMA} train.micro_batch=2")
    assert plan.config.model.kernels == "none"
    (event,) = [e for e in plan.events if e["kind"] == "chosen"]
    reason = "because liger-kernel is not installed (pip install)"
    assert event["message"] == f"model.kernels=none, {reason}"
