"""What a plan chooses where kernels, compilation and micro-batch are open."""

import importlib.util

import pytest

from harness.config.ds_json import value_of
from harness.plan import speed
from harness.plan.plan import Plan
from tests.plan.plans import Planner

LLAMA = "model.name=llama-1b data.seq_len=4096"
H200 = "GPU=h200 ds.bf16.enabled=true ds.zero_optimization.stage=1"


def chosen(plan: Plan) -> tuple[str, bool, int]:
    """Return what the plan has chosen, which its JSON and its estimate must agree with."""
    model, inputs = plan.config.model, plan.estimate.inputs
    assert (inputs.liger, inputs.compiled) == (model.kernels == "liger", model.compile)
    assert plan.micro_batch == inputs.micro_batch
    assert value_of(plan.deepspeed, "train_micro_batch_size_per_gpu") == plan.micro_batch
    return model.kernels, model.compile, plan.micro_batch


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{H200} {LLAMA}", ("liger", False, 16)),
        (f"{H200} {LLAMA} train.steps=20000", ("liger", False, 16)),
        (f"{H200} {LLAMA} train.micro_batch=2", ("liger", False, 2)),
        (f"{H200} {LLAMA} ds.gradient_accumulation_steps=12", ("liger", False, 4)),
        (f"{H200} {LLAMA} model.kernels=none", ("none", False, 12)),
        (f"{H200} {LLAMA} model.kernels=none train.steps=20000", ("none", True, 16)),
        (
            f"{H200} {LLAMA} model.kernels=none train.steps=20000 model.compile=false",
            ("none", 0, 12),
        ),
        (f"{H200} {LLAMA} model.compile=true train.micro_batch=1", ("liger", True, 1)),
        (f"{H200} {LLAMA} model.checkpointing=selective model.kernels=none", ("none", False, 24)),
        (f"GPU=h200 RANKS=2 ds.pipeline.stages=2 {LLAMA}", ("none", False, 1)),
        (f"GPU=h200 RANKS=2 ds.sequence_parallel_size=2 {LLAMA}", ("none", False, 12)),
        (
            "GPU=v100-32 ds.fp16.enabled=true model.name=llama-1b data.seq_len=2048",
            ("none", False, 1),
        ),
        (
            "GPU=h200 ds.fp16.enabled=true model.name=llama-1b train.micro_batch=1",
            ("none", False, 1),
        ),
        (f"{H200} {LLAMA} data.rehearse=$rows.jsonl train.micro_batch=1", ("none", False, 1)),
        (f"{H200} model.name=mixtral-8x7b model.overrides.num_hidden_layers=1", ("none", False, 8)),
        (f"{H200} model.name=olmo2-7b train.steps=900000 train.micro_batch=1", ("none", False, 1)),
        (f"{H200} model.name=gpt2-124m train.steps=900000 train.micro_batch=1", ("none", True, 1)),
        (f"GPU=t4 ds.fp16.enabled=true {LLAMA}", ("none", False, 1)),  # nothing fits
        (LLAMA, ("none", False, 8)),  # ranks on the CPU
    ],
)
def test_plan_chooses_options(line: str, expected: tuple[str, bool, int], planned: Planner) -> None:
    assert chosen(planned(line)) == expected


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
