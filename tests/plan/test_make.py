from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.ds_json import DsJson
from harness.config.optim_and_schedule import OptimConfig, Schedule
from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan import precision
from harness.plan.make import make_plan
from harness.plan.text import describe
from tests.trainer_json import ADAMW, FP16, WARMUP, ZERO_3

REPOSITORY = Path(__file__).resolve().parents[2]
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}

# As the documentation of the Hugging Face Trainer has it.
HF_TRAINER_ZERO3 = {
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    "optimizer": ADAMW,
    "scheduler": WARMUP,
    "zero_optimization": {
        **ZERO_3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


STAGE_1 = {"zero_optimization": {"stage": 1}}


@pytest.fixture(autouse=True)
def cpu_with_bf16(monkeypatch):
    """The meaning of "auto" on a CPU depends on the one at hand."""
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: True)


def plan(ds, *assignments, ranks=1, **world):
    return make_plan(
        load_run_config(None, assignments),
        DsJson(ds, "ds.json"),
        World(world_size=ranks, local_world_size=ranks, **world),
    )


def problems_of(ds, *assignments, ranks=1, **world):
    with pytest.raises(ConfigError) as caught:
        plan(ds, *assignments, ranks=ranks, **world)
    return caught.value.problems


def test_what_deepspeed_gets_is_literal_and_consistent():
    made = plan(BF16, "train.global_batch=24", "train.micro_batch=2", ranks=4)
    ds = made.deepspeed
    assert (ds["train_micro_batch_size_per_gpu"], ds["gradient_accumulation_steps"]) == (2, 3)
    assert ds["train_batch_size"] == 24
    assert ds["gradient_clipping"] == 1.0
    assert ds["optimizer"] == {
        "type": "AdamW",
        "params": {
            "lr": RunConfig().optim.lr,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "torch_adam": True,  # these ranks are CPUs
        },
    }
    assert ds["steps_per_print"] > 10**6
    assert (made.precision, made.zero_stage, made.steps) == ("bf16", 2, 100)


def test_a_json_of_the_hugging_face_trainer_works_unchanged():
    made = plan(HF_TRAINER_ZERO3, "optim.warmup_steps=7", "train.steps=20", ranks=2)
    ds = made.deepspeed
    assert '"auto"' not in json.dumps(ds)
    assert "scheduler" not in ds
    assert (ds["bf16"]["enabled"], ds["fp16"]["enabled"]) == (True, False)
    assert ds["steps_per_print"] == 2000
    hidden = made.model_config["hidden_size"]
    zero = ds["zero_optimization"]
    assert zero["reduce_bucket_size"] == hidden**2
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * hidden**2)
    assert zero["stage3_param_persistence_threshold"] == 10 * hidden
    assert (zero["sub_group_size"], type(zero["sub_group_size"])) == (10**9, int)
    assert made.config.optim.schedule == "constant"
    assert made.schedule(20).lr(20) == made.config.optim.lr


def test_the_throughput_timer_is_off_unless_the_json_sets_it():
    """It waits for the device twice in every micro-batch."""
    for timers in ({}, {"throughput": {}}, {"throughput": {"enabled": "auto"}}):
        made = plan({"timers": timers})
        assert made.deepspeed["timers"] == {"throughput": {"enabled": False}}
        assert made.to_json()["deepspeed"]["timers"] == {"throughput": {"enabled": False}}
        assert '"enabled": false' in describe(made).partition('"throughput"')[2][:40]
    made = plan({"timers": {"throughput": {"enabled": True, "synchronized": False}}})
    assert made.deepspeed["timers"] == {"throughput": {"enabled": True, "synchronized": False}}
    assert plan({}).deepspeed["timers"] == {"throughput": {"enabled": False}}


def test_only_deepspeeds_own_meaning_of_auto_survives():
    ds = {"pipeline": {"stages": "auto"}, "zero_optimization": {"stage": 1, "overlap_comm": "auto"}}
    resolved = plan(ds).deepspeed
    assert resolved["pipeline"] == {"stages": "auto"}
    assert resolved["zero_optimization"] == {"stage": 1}


def test_the_users_json_is_left_alone_and_its_other_keys_stay():
    ds = {"csv_monitor": {"enabled": True, "output_path": "x"}, "wall_clock_breakdown": True}
    before = json.dumps(ds)
    resolved = plan(ds).deepspeed
    assert json.dumps(ds) == before
    assert {key: resolved[key] for key in ds} == ds


@pytest.mark.parametrize(
    ("ds", "assignments", "ranks", "expected"),
    [
        ({}, [], 1, (48, 8, 6)),
        ({}, [], 3, (48, 8, 2)),
        ({}, ["train.global_batch=20"], 2, (20, 5, 2)),
        ({}, ["train.global_batch=26"], 2, (26, 1, 13)),
        ({"train_micro_batch_size_per_gpu": 2}, [], 2, (48, 2, 12)),
        ({"gradient_accumulation_steps": 4}, [], 2, (48, 6, 4)),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, [], 2, (16, 4, 2)),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5},
            [],
            3,
            (30, 2, 5),
        ),
        ({"gradient_accumulation_steps": 5}, ["train.micro_batch=2"], 3, (30, 2, 5)),
        ({"train_batch_size": 8.0}, ["train.micro_batch=2"], 2, (8, 2, 2)),
    ],
)
def test_batch_arithmetic(ds, assignments, ranks, expected):
    made = plan(ds, *assignments, ranks=ranks)
    assert (made.global_batch, made.micro_batch, made.grad_accum) == expected
    assert made.deepspeed["train_batch_size"] == expected[0]
    assert all(type(number) is int for number in (made.global_batch, made.grad_accum))


def test_a_global_batch_that_the_json_multiplies_to_is_adopted():
    ds = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}
    made = plan(ds, ranks=3)
    assert made.config.train.global_batch == 30
    assert made.config.origin("train.global_batch") == "ds.json: gradient_accumulation_steps"
    assert "train.global_batch" in [event["key"] for event in made.events]


@pytest.mark.parametrize(
    ("ds", "assignments", "ranks", "expected"),
    [
        ({}, [], 5, r"train\.global_batch = 48 does not divide over 5 data ranks.* 45 or 50"),
        ({}, ["train.micro_batch=5"], 2, r"train\.micro_batch = 5 .* 24 samples .* 4 and 6"),
        ({"gradient_accumulation_steps": 5}, [], 2, r"gradient_accumulation_steps = 5 .* 4 and 6"),
        ({"gradient_accumulation_steps": 0}, [], 2, r"steps is 0 \(ds.json\): .* at least 1"),
        (
            {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 3},
            ["train.global_batch=48"],
            2,
            r"gradient_accumulation_steps = 2, but train\.global_batch 48 = train\.micro_batch 3 "
            r"x 2 data ranks x 8: set it to 8",
        ),
    ],
)
def test_a_batch_that_does_not_multiply_names_the_nearest_that_do(ds, assignments, ranks, expected):
    (problem,) = problems_of(ds, *assignments, ranks=ranks)
    assert re.search(expected, problem)


ADAM = {"betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True}


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("adamw", {"type": "AdamW", "params": ADAM}),
        ("adam", {"type": "Adam", "params": {**ADAM, "adam_w_mode": False}}),
        ("sgd", {"type": "SGD", "params": {"momentum": 0.0}}),
    ],
)
def test_optimizer_section(name, section):
    ds = plan(BF16, f"optim.name={name}").deepspeed
    params = section["params"] | {"lr": RunConfig().optim.lr, "weight_decay": 0.1}
    assert ds["optimizer"] == {**section, "params": params}
    assert ds.get("zero_allow_untested_optimizer", False) is (name == "sgd")


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["adamw", "adam", "muon", "sgd"])
def test_torchs_adam_steps_fused_on_gpus_and_deepspeeds_only_on_the_host(
    accelerator, offload, name, monkeypatch
):
    """No compiler is needed unless an optimizer is offloaded."""
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    ds = {"zero_optimization": {"stage": 2}}
    if offload:
        ds["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    made = make_plan(RunConfig(optim={"name": name}), ds, World(accelerator=accelerator), here=True)
    params = made.deepspeed["optimizer"]["params"]
    assert params.get("torch_adam", False) is (name in ("adamw", "adam") and not offload)
    is_fused = accelerator == "cuda" and name != "sgd" and not offload
    assert params.get("fused", False) is is_fused
    assert "fallback" not in [event["kind"] for event in made.events]


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_json_may_choose_whether_adam_is_fused(accelerator, fused):
    ds = {"optimizer": {"params": {"fused": fused}}}
    made = make_plan(RunConfig(), ds, World(accelerator=accelerator))
    assert made.deepspeed["optimizer"]["params"].get("fused", False) is fused


def test_clipping_by_value_turns_deepspeeds_clipping_off():
    assert plan(BF16, "optim.clip_value=0.5").deepspeed["gradient_clipping"] == 0.0
    assert plan(BF16, "optim.clip_norm=0").deepspeed["gradient_clipping"] == 0.0


def test_the_schedule_is_the_run_configs():
    made = plan(BF16, "optim.schedule=wsd", "optim.warmup_steps=3", "optim.decay_fraction=0.5")
    optim = OptimConfig(schedule="wsd", warmup_steps=3, decay_fraction=0.5)
    assert made.schedule(100) == Schedule(optim, 100)


def test_the_schedule_is_the_jsons_where_it_has_one():
    params = {"total_num_steps": 200, "warmup_num_steps": 10, "cos_min_ratio": 0.01}
    made = plan({"scheduler": {"type": "WarmupCosineLR", "params": params}}, "optim.lr=1e-4")
    assert made.steps == 200
    optim = OptimConfig(
        schedule="cosine", lr=1e-4, warmup_steps=10, warmup_type="log", min_lr_ratio=0.01
    )
    assert made.schedule(200) == Schedule(optim, 200)


def test_a_run_of_no_steps_is_planned():
    made = plan({}, "train.steps=0")
    assert made.steps == 0
    assert re.search(r"^length +0 steps = 0 tokens$", describe(made), re.MULTILINE)


@pytest.mark.parametrize(
    ("ds", "world", "precision"),
    [
        ({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}, {}, "bf16"),
        (
            {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}},
            {"accelerator": "cuda", "gpu": "NVIDIA H200"},
            "bf16",
        ),
        (
            {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}},
            {"accelerator": "cuda", "gpu": "Tesla V100-SXM2-32GB"},
            "fp32",
        ),
        (
            {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}},
            {"accelerator": "cuda", "gpu": "Unheard Of 9000"},
            "bf16",
        ),
        (
            {
                "bf16": {"enabled": "auto"},
                "fp16": {"enabled": True},
                "zero_optimization": {"stage": 1},
            },
            {},
            "fp16",
        ),
        ({"fp16": {"enabled": "auto"}}, {}, "fp32"),
        ({}, {}, "fp32"),
    ],
)
def test_precision(ds, world, precision):
    made = plan(ds, **world)
    assert made.precision == precision
    assert made.deepspeed.get("bf16", {}).get("enabled", False) is (precision == "bf16")
    assert made.deepspeed.get("fp16", {}).get("enabled", False) is (precision == "fp16")


def test_falling_back_to_fp32_is_an_event():
    made = plan(
        {"bf16": {"enabled": "auto"}}, accelerator="cuda", gpu="Tesla V100-SXM2-16GB", ranks=1
    )
    assert [event["kind"] for event in made.events] == ["fallback"]


def test_automatic_bf16_is_fp32_on_a_cpu_that_only_emulates_it(monkeypatch):
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: False)
    made = plan({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}})
    assert (made.precision, made.deepspeed["bf16"]["enabled"]) == ("fp32", False)
    assert [event["kind"] for event in made.events] == ["fallback"]
    assert plan(BF16).precision == "bf16"


def test_bf16_on_a_gpu_without_it_is_refused():
    (problem,) = problems_of(BF16, accelerator="cuda", gpu="Tesla V100-SXM2-16GB")
    assert "Tesla V100-SXM2-16GB has no bfloat16: use ds_configs/fp16.json" in problem


def test_what_could_not_stay_as_the_json_had_it_is_an_event():
    ds = {
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "foreach": True}},
        "steps_per_print": 0,
        "train_micro_batch_size_per_gpu": 4,
    }
    overridden = {
        event["json_key"]: (event["was"], event["value"])
        for event in plan(ds).events
        if event["kind"] == "changed"
    }
    assert overridden == {
        "optimizer.type": ("Adam", "AdamW"),
        "optimizer.params.foreach": (True, None),
        "steps_per_print": (0, 2**31 - 1),
    }


def test_both_files_mistakes_are_in_one_report():
    ds = {
        "zero_optimization": {"stage": 0, "stagee": 1},
        "bf16": {"enabled": True},
        "fp16": {"enabled": True},
        "gradient_clipping": -1,
        "train_batch_size": 64,
        "optimizer": {"type": "Lamb"},
    }
    problems = problems_of(
        ds, "train.global_batch=48", "data.seq_len=4096", "model.overrides.hidden=1", ranks=5
    )
    for message in (
        "zero_optimization.stagee",
        "gradient_clipping is -1",
        "train.global_batch is 48",
        "optimizer.type is 'Lamb'",
        "fp16.enabled (ds.json) and bf16.enabled (ds.json) are both true",
        "does not divide over 5 data ranks",
        "model.overrides.hidden",
    ):
        assert sum(message in problem for problem in problems) == 1, message


def test_a_sequence_longer_than_the_positions():
    (problem,) = problems_of({}, "data.seq_len=4096")
    assert problem == (
        "data.seq_len is 4096 (command line), but tiny has 2048 positions: "
        "set data.seq_len to 2048 or less, or model.context=4096, to extend its positions"
    )


def test_a_scheduler_of_another_length_than_the_users():
    params = {"total_num_steps": 100, "warmup_num_steps": 10}
    ds = {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    (problem,) = problems_of(ds, "train.steps=200")
    assert "train.steps is 200 (command line), but scheduler.params.total_num_steps is 1" in problem


def test_flash_attention_on_a_cpu():
    (problem,) = problems_of({}, "model.attention=flash_attention_2")
    assert "it needs a GPU and the package flash_attn" in problem


def test_a_second_copy_is_shared_by_ranks_that_divide():
    def zero(size):
        return {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}}

    (problem,) = problems_of(zero(4), ranks=6)
    assert "zero_hpz_partition_size is 4 (ds.json), over which 6 ranks do not divide" in problem
    assert plan(zero(8), ranks=6).deepspeed["zero_optimization"]["zero_hpz_partition_size"] == 8


def test_what_lies_on_nvme_is_not_clamped():
    section = {"device": "nvme", "nvme_path": "/tmp"}
    ds = {"zero_optimization": {"stage": 3, "offload_optimizer": section}}
    (problem,) = problems_of(ds, "optim.clip_value=0.5")
    assert "optim.clip_value is 0.5 (command line): gradients on NVMe are not clamped" in problem


def test_soft_capped_scores_take_the_attention_that_has_them():
    made = plan({}, "model.name=gemma-2-9b")
    assert made.config.model.attention == "eager"
    assert made.attention_why.startswith("sdpa has no soft-capped attention scores")
    assert plan({}, "model.name=gemma-2-9b", "model.attention=eager").events == ()


def test_soft_capped_scores_without_the_cap_are_refused():
    (problem,) = problems_of({}, "model.name=gemma-2-9b", "model.attention=sdpa")
    assert "model.attention is 'sdpa' (command line)" in problem
    assert 'gemma2 models have; use "auto" or "eager"' in problem


def test_an_unknown_architecture_is_planned_without_its_shape(tmp_path):
    config = {"model_type": "brand_new", "hidden_size": 8, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = plan({}, f"model.name={tmp_path}")
    assert made.shape is None
    assert [event["kind"] for event in made.events] == ["unknown_architecture"]
    assert "does not know this architecture" in describe(made)


def test_a_config_that_makes_no_sense_is_a_problem(tmp_path):
    config = {"model_type": "llama", "hidden_size": -8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = problems_of({}, f"model.name={tmp_path}")
    assert "hidden_size" in problem


def test_to_json_is_plain_and_complete():
    made = plan(HF_TRAINER_ZERO3, "optim.lr=1e-4", ranks=2)
    text = json.dumps(made.to_json(), allow_nan=False)
    saved = json.loads(text)
    assert saved["deepspeed"] == made.deepspeed
    assert saved["deepspeed_given"] == HF_TRAINER_ZERO3
    assert saved["run"]["optim"]["lr"] == 1e-4
    assert saved["run_set"]["optim.lr"] == "command line"
    assert saved["grid"]["data"] == 2


def test_the_text_says_where_the_data_is_not(tmp_path):
    (tmp_path / "tokens.bin").touch()
    for path, is_named in (("tokens", False), ("tokens.bin", False), ("texts", True)):
        text = describe(plan({}, f"data.path={tmp_path / path}"))
        assert (f"data.path: {tmp_path / path} does not exist" in text) is is_named
    assert "does not exist" not in describe(plan({}))


def test_describe_spells_out_what_will_happen():
    ds = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
    text = describe(plan(ds, "train.steps=10", "optim.lr=2e-3", "optim.warmup_steps=2", ranks=2))
    for line in (
        r"^model +llama \(preset tiny\), fresh random weights",
        r"^spread +ZeRO 1, bf16, 2 ranks \(2 data\) on cpu, offload: none",
        r"^batch +48 samples a step = micro-batch 8 x 3 accumulated x 2 data ranks, 128 tokens",
        r"^length +10 steps = 61,440 tokens",
        r"^learning rate +cosine: 0\.001 at step 1, 0\.002 at step 2, 0\.0002 at step 10",
        r"^note +optim\.clip_norm = 0\.5, from the JSON's gradient_clipping",
        r'^  "gradient_clipping": 0\.5,$',
        r'^  "train_batch_size": 48,$',
    ):
        assert re.search(line, text, re.MULTILINE), line


def test_a_plan_needs_no_torch():
    code = """
import sys
from harness.plan.command import parse_command, plan_from
from harness.plan.text import describe
describe(plan_from(parse_command([]), {"DS_ACCELERATOR": "cpu"}))
loaded = {"torch", "transformers", "deepspeed", "numpy"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


@pytest.mark.parametrize(
    ("ds", "expected"),
    [
        ({"pipeline": {"stages": "two"}}, "pipeline.stages is 'two' (ds.json): it must be a whole"),
        ({"fp16": "auto"}, "fp16 is 'auto' (ds.json): it must be an object"),
    ],
)
def test_an_odd_value_is_a_problem_and_not_a_crash(ds, expected):
    (problem,) = problems_of(ds)
    assert problem.startswith(expected)


def test_fp16_and_clipping_by_value_exclude_each_other():
    (problem,) = problems_of({"fp16": {"enabled": True}, **STAGE_1}, "optim.clip_value=1.0")
    assert problem.startswith("optim.clip_value is 1.0 (command line), which hides overflows")
    assert "optim.clip_norm" in problem
    assert plan({**STAGE_1}, "optim.clip_value=1.0")


def test_weights_of_another_shape_are_refused_with_the_key_to_change():
    (problem,) = problems_of({}, "model.name=tiny", "model.init_from=llama-1b")
    assert problem.startswith("model.init_from is 'llama-1b' (command line), whose model.embed")
    assert "is (128256, 2048), but tiny's is (8192, 192): set model.name=llama-1b" in problem
    (problem,) = problems_of(
        {}, "model.name=llama-1b", "model.init_from=llama-1b", "model.overrides.vocab_size=128300"
    )
    assert "model.overrides" in problem


def test_weights_with_more_layers_than_the_model_are_refused():
    (problem,) = problems_of(
        {},
        "model.name=gpt2-124m",
        "model.init_from=gpt2-124m",
        "model.overrides.n_layer=3",
    )
    assert "h.3" in problem
    assert "not there" in problem


def test_weights_that_are_not_there_are_blamed_on_their_own_key():
    (problem,) = problems_of({}, "model.init_from=./nowhere")
    assert (
        problem == "model.init_from is './nowhere' (command line): there is no such file or folder"
    )


@pytest.mark.parametrize(
    ("width", "ds", "multiple"), [(66, {}, 4), (68, {}, None), (68, BF16, 8), (72, BF16, None)]
)
def test_experts_of_a_width_that_torch_cannot_group_are_refused(width, ds, multiple):
    words = ("model.name=mixtral-8x7b", f"model.overrides.intermediate_size={width}")
    if multiple is None:
        assert plan(ds, *words).shape
        return
    with pytest.raises(ConfigError, match=rf"intermediate_size {width}, but .* of {multiple}: set"):
        plan(ds, *words)
