from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import pytest

from harness.config.assignments import flat
from harness.config.ds_file import read_ds_json
from harness.config.ds_keys import literal, value_of
from harness.config.run_config import RunConfig
from harness.layout.world import World
from harness.plan import precision
from harness.plan.make import make_plan
from tests.shipped import DS_CONFIGS, fewest_ranks, model_for

# name -> (precision, stage, what is offloaded)
EXPECTED = {
    "3d": ("bf16", 1, ""),
    "fp16": ("fp16", 1, ""),
    "fp16_static": ("fp16", 1, ""),
    "fp32": ("fp32", 1, ""),
    "moe_expert8": ("bf16", 1, ""),
    "pipeline2": ("bf16", 1, ""),
    "pipeline2_fp16": ("fp16", 1, ""),
    "pipeline4": ("bf16", 1, ""),
    "tensor2_zero1": ("bf16", 1, ""),
    "zero0": ("fp32", 0, ""),
    "zero1": ("bf16", 1, ""),
    "zero2": ("bf16", 2, ""),
    "zero2_bf16_states": ("bf16", 2, ""),
    "zero2_offload": ("bf16", 2, "optimizer"),
    "zero3": ("bf16", 3, ""),
    "zero3_nvme": ("bf16", 3, "param"),
    "zero3_offload": ("bf16", 3, "optimizer param"),
    "zero3_sequence8": ("bf16", 3, ""),
    "zeropp": ("bf16", 3, ""),
}


@pytest.fixture(autouse=True)
def cpu_with_bf16(monkeypatch):
    """The meaning of "auto" on a CPU depends on the one at hand."""
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: True)


def shipped(name):
    """Its plan on the fewest ranks that it needs."""
    ds = read_ds_json(DS_CONFIGS / f"{name}.json")
    ranks = fewest_ranks(ds)
    run = RunConfig.model_validate({"model": {"name": model_for(ds)}})
    return make_plan(run, ds, World(world_size=ranks, local_world_size=ranks))


def test_every_shipped_json_is_expected_here():
    assert {path.stem for path in DS_CONFIGS.glob("*")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_means_what_its_name_says(name):
    plan = shipped(name)
    offloaded = [
        what
        for what in ("optimizer", "param")
        if value_of(plan.deepspeed, f"zero_optimization.offload_{what}.device") == "cpu"
    ]
    assert (plan.precision, plan.zero_stage, " ".join(offloaded)) == EXPECTED[name]
    assert plan.events == ()
    if plan.precision == "bf16":
        assert plan.deepspeed["data_types"]["grad_accum_dtype"] == "fp32"


@pytest.mark.parametrize(("name", "stages"), [("pipeline2", 2), ("pipeline4", 4)])
def test_a_pipelined_json_splits_the_default_model(name, stages):
    plan = shipped(name)
    assert plan.grid.pipeline == stages == len(plan.stages) - 1


def test_bf16_states_are_fp32_where_the_device_has_no_bf16(monkeypatch):
    assert shipped("zero2_bf16_states").deepspeed["bf16"]["bf16_optimizer_states"] is True
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: False)
    plan = shipped("zero2_bf16_states")
    assert (plan.precision, plan.deepspeed["bf16"]) == ("fp32", {"enabled": False})


def test_nvme_begins_where_temporary_files_are(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    section = shipped("zero3_nvme").deepspeed["zero_optimization"]["offload_optimizer"]
    assert (section["device"], section["nvme_path"]) == ("nvme", str(tmp_path))


def test_zeropp_copies_the_weights_into_every_node():
    def copies(world_size, per_node):
        ds = read_ds_json(DS_CONFIGS / "zeropp.json")
        plan = make_plan(RunConfig(), ds, World(world_size=world_size, local_world_size=per_node))
        return plan.deepspeed["zero_optimization"]["zero_hpz_partition_size"]

    assert [copies(4, 2), copies(16, 8), copies(1, 1)] == [2, 8, 1]


def test_fp16_shows_every_knob_of_dynamic_loss_scaling():
    knobs = {
        "enabled",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    }
    assert set(read_ds_json(DS_CONFIGS / "fp16.json")["fp16"]) == knobs
    assert value_of(shipped("fp16").deepspeed, "fp16.loss_scale") == 0
    assert value_of(shipped("fp16_static").deepspeed, "fp16.loss_scale") > 1


@pytest.mark.parametrize("name", EXPECTED)
def test_says_nothing_that_the_run_config_owns(name):
    """So that no key=value of the run config can conflict with a shipped JSON."""
    ds = read_ds_json(DS_CONFIGS / f"{name}.json")
    owned = ("optimizer", "scheduler", "gradient_clipping", "train_batch_size")
    assert [key for key in owned if literal(ds, key) is not None] == []


def test_deepspeed_itself_accepts_and_understands_every_resolved_json():
    resolved, batches = {}, {}
    for name in EXPECTED:
        plan = shipped(name)
        # DeepSpeed takes ranks that have parts of one row for data ranks, and has one rank here.
        samples = plan.deepspeed["train_batch_size"] // plan.grid.sequence // plan.grid.data
        resolved[name] = {**plan.deepspeed, "train_batch_size": samples}
        batches[name] = [48, 8, 6] if plan.grid.data == 1 else [6, 6, 1]  # of eight data ranks
    code = """
import json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.runtime.config import DeepSpeedConfig
read = {}
for name, ds in json.load(sys.stdin).items():
    config = DeepSpeedConfig(ds)
    zero = config.zero_config
    read[name] = {
        "precision": "bf16" if config.bfloat16_config.enabled
        else "fp16" if config.float16_config.enabled else "fp32",
        "stage": int(zero.stage),
        "offloaded": " ".join(
            what for what in ("optimizer", "param")
            if getattr(zero, f"offload_{what}") and getattr(zero, f"offload_{what}").device == "cpu"
        ),
        "batch": [config.train_batch_size, config.train_micro_batch_size_per_gpu,
                  config.gradient_accumulation_steps],
    }
print(json.dumps(read))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(resolved),
        capture_output=True,
        text=True,
        check=True,
    )
    read = json.loads(done.stdout.splitlines()[-1])
    for name, (expected, stage, offloaded) in EXPECTED.items():
        assert read[name]["precision"] == expected
        assert (read[name]["stage"], read[name]["offloaded"]) == (stage, offloaded)
        assert read[name]["batch"] == batches[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_value_is_given_for_a_reason(name):
    """A shipped JSON repeats a default of DeepSpeed only to show a knob."""
    ds = read_ds_json(DS_CONFIGS / f"{name}.json")
    repeated = {key for key, value in flat(ds) if value_of({}, key) == value}
    assert {key for key in repeated if not key.startswith("fp16.")} <= {
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.pin_memory",
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_gradients",
    }
