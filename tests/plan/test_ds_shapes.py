"""DeepSpeed JSONs as people have them: one of each kind, in the style of the projects named, that
pass unchanged, or that say what to write instead.

Of 140 real files with "auto", of 29 public repositories, 130 pass; those here have their keys.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.command import parse_command, plan_from
from harness.plan.plan import Plan
from harness.plan.text import describe
from tests.trainer_json import ADAMW, FP16, WARMUP, ZERO_3

Json = dict[str, Any]
WARMUP_DECAY = {
    "type": "WarmupDecayLR",
    "params": {**WARMUP["params"], "total_num_steps": "auto"},
}
BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
STAGE_2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
}
CPU = {"device": "cpu", "pin_memory": True}
AUTO_BF16 = {"bf16": {"enabled": "auto"}, "fp16": FP16}

# Name -> the JSON, and what a note of its plan says; None: it has none of its own.
PASS: dict[str, tuple[Json, str | None]] = {
    "trainer, stage 2": ({**AUTO_BF16, **BATCH, "zero_optimization": STAGE_2}, None),
    "trainer, stage 3, offload": (
        {
            **AUTO_BF16,
            **BATCH,
            "optimizer": ADAMW,
            "scheduler": WARMUP,
            "zero_optimization": {**ZERO_3, "offload_optimizer": CPU, "offload_param": CPU},
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        None,
    ),
    "LLaMA-Factory, AutoTP": (
        {
            **AUTO_BF16,
            **BATCH,
            "zero_optimization": STAGE_2,
            "tensor_parallel": {"autotp_size": 2},
        },
        None,
    ),
    "LLaMA-Factory, stage 0": (
        {
            **AUTO_BF16,
            **BATCH,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {**STAGE_2, "stage": 0, "round_robin_gradients": True},
        },
        "zero_optimization.stage is 1, not 0",
    ),
    "ms-swift, stage 0, bf16": (
        {"bf16": {"enabled": True}, **BATCH, "zero_optimization": {"stage": 0}},
        "zero_optimization.stage is 1, not 0",
    ),
    "LMFlow, stage 0, fp16": (
        {"fp16": {"enabled": True}, **BATCH, "zero_optimization": {"stage": 0}},
        "zero_optimization.stage is 1, not 0",
    ),
    "LLaMA-Factory, offload, keys that DeepSpeed never reads": (
        {
            **AUTO_BF16,
            **BATCH,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {**ZERO_3, "offload_optimizer": CPU},
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "tag": "mine"},
        },
        "comms_config, monitor_config (",
    ),
    "axolotl, stage 3, the fields' own names": (
        {
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 0,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "max_live_parameters": 0,
                "max_reuse_distance": 0,
                "gather_16bit_weights_on_model_save": True,
            },
            "bf16": {"enabled": True},
            "fp16": {**FP16, "auto_cast": False},
            **BATCH,
            "wall_clock_breakdown": False,
        },
        None,
    ),
    "axolotl, stage 1, no precision": (
        {**AUTO_BF16, **BATCH, "zero_optimization": {"stage": 1, "overlap_comm": True}},
        None,
    ),
    "LLaVA, stage 3, offload": (
        {
            **AUTO_BF16,
            **BATCH,
            "optimizer": ADAMW,
            "scheduler": WARMUP,
            "zero_optimization": {
                **{key: value for key, value in ZERO_3.items() if "gather" not in key},
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "gather_16bit_weights_on_model_save": True,
            },
            "steps_per_print": 1e5,
        },
        None,
    ),
    "LLaVA-NeXT, stage 2, weights offloaded": (
        {
            **AUTO_BF16,
            **BATCH,
            "zero_optimization": {**STAGE_2, "offload_optimizer": CPU, "offload_param": CPU},
        },
        "zero_optimization.offload_param.device is 'none', not 'cpu'",
    ),
    "FlagEmbedding, bf16 with fp16's keys": (
        {
            **AUTO_BF16,
            "bf16": dict(FP16),
            **BATCH,
            "optimizer": ADAMW,
            "scheduler": WARMUP_DECAY,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
        },
        "bf16 has no loss scale",
    ),
    "BELLE, bfloat16": (
        {"bfloat16": {"enabled": "auto"}, **BATCH, "zero_optimization": ZERO_3},
        None,
    ),
    "trlx, Apex in fp16": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": "auto",
            "fp16": {"enabled": True, "min_loss_scale": 1, "opt_level": "O2"},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": ADAMW,
        },
        "it was for Apex AMP",
    ),
    "FastChat, literals in auto": (
        {
            "zero_optimization": {**ZERO_3, "offload_param": CPU, "offload_optimizer": CPU},
            "bf16": {"enabled": True},
            **BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
        },
        "optim.weight_decay = 0.0, DeepSpeed's default for AdamW",
    ),
    "WizardLM, a schedule of its own": (
        {
            "zero_optimization": ZERO_3,
            "fp16": {**FP16, "enabled": True},
            **BATCH,
            "optimizer": ADAMW,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-5}},
        },
        "optim.warmup_steps = 1000, DeepSpeed's default for WarmupLR",
    ),
    "dolly, decay to zero": (
        {
            "bf16": {"enabled": "auto"},
            "optimizer": ADAMW,
            "scheduler": WARMUP_DECAY,
            "zero_optimization": ZERO_3,
            **BATCH,
        },
        "optim.schedule = 'linear', from the JSON's scheduler.type",
    ),
    "ChatGLM, tiny": (
        {
            "train_micro_batch_size_per_gpu": "auto",
            "zero_allow_untested_optimizer": True,
            "fp16": {**FP16, "enabled": "auto"},
            "zero_optimization": {**STAGE_2, "allgather_partitions": True, "overlap_comm": False},
        },
        None,
    ),
    "Qwen, stage 3": (
        {
            **AUTO_BF16,
            **BATCH,
            "optimizer": ADAMW,
            "scheduler": WARMUP,
            "zero_optimization": {
                **ZERO_3,
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "offload_param": {"device": "none", "pin_memory": True},
            },
            "steps_per_print": 100,
        },
        None,
    ),
    "InternVL, buckets and threads": (
        {
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": 1e9,
                "stage3_prefetch_bucket_size": 1e7,
                "stage3_param_persistence_threshold": 1e5,
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "fp16": {**FP16, "auto_cast": True},
            "bf16": {"enabled": "auto"},
            **BATCH,
            "optimizer": ADAMW,
            "wall_clock_breakdown": True,
        },
        None,
    ),
    "open-instruct, stage 3 of accelerate": (
        {
            "bf16": {"enabled": "auto"},
            "zero_optimization": {**ZERO_3, "stage3_gather_16bit_weights_on_model_save": True},
            **BATCH,
            "steps_per_print": 1e5,
        },
        None,
    ),
    "alignment-handbook, as accelerate writes it": (
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "none", "nvme_path": None},
                "offload_param": {"device": "none", "nvme_path": None},
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "gradient_clipping": "auto",
            "steps_per_print": float(2**31),
            "bf16": {"enabled": True},
            "fp16": {"enabled": False},
        },
        None,
    ),
    "DeepSpeed-Chat, without the engine for two": (
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "none"},
                "stage3_param_persistence_threshold": 1e4,
                "stage3_max_live_parameters": 3e7,
                "stage3_prefetch_bucket_size": 3e7,
                "memory_efficient_linear": False,
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
            "tensorboard": {"enabled": False, "output_path": "tb", "job_name": "x"},
        },
        None,
    ),
    "LLaVA-NeXT, ZeRO++": (
        {
            **AUTO_BF16,
            **BATCH,
            "zero_optimization": {
                **ZERO_3,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 8,
                "zero_quantized_gradients": True,
            },
        },
        None,
    ),
    "BELLE, profiled": (
        {
            **AUTO_BF16,
            **BATCH,
            "zero_optimization": STAGE_2,
            "flops_profiler": {
                "enabled": False,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 1,
                "detailed": True,
                "output_file": None,
            },
        },
        None,
    ),
    "comments and what was removed": (
        {
            "_comment": "from the wiki",
            **AUTO_BF16,
            **BATCH,
            "zero_optimization": STAGE_2,
            "amp": {"enabled": "auto", "opt_level": "auto"},
            "curriculum_learning": {"enabled": False},
        },
        "amp, curriculum_learning (",
    ),
    "DeepSpeedExamples, autotuning": (
        {**AUTO_BF16, **BATCH, "autotuning": {"enabled": True, "fast": False}},
        "autotuning.enabled is False, not True",
    ),
    "as old as ZeRO-Offload": (
        {**BATCH, "fp16": FP16, "zero_optimization": {"stage": 2, "cpu_offload": True}},
        'read as "offload_optimizer": {"device": "cpu"}',
    ),
    "DeepSpeed's example of bf16 masters": (
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
            },
            "bf16": {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
            },
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
        },
        "train.global_batch = 32, from the JSON's gradient_accumulation_steps",
    ),
}

# Name -> the JSON, and what its one problem says to write instead.
REFUSED: dict[str, tuple[Json, str]] = {
    "axolotl, torch.compile": (
        {**AUTO_BF16, **BATCH, "compile": {"backend": "inductor"}},
        "compile.backend ({path}) is not a key that DeepSpeed knows: for torch.compile set "
        "model.compile=true in the run config",
    ),
    "offload beside the section": (
        {**AUTO_BF16, **BATCH, "zero_optimization": STAGE_2, "offload_optimizer": CPU},
        "offload_optimizer ({path}) is not a key that DeepSpeed knows; did you mean "
        "zero_optimization.offload_optimizer?",
    ),
    "Apex": (
        {**BATCH, "amp": {"enabled": True, "opt_level": "O1"}},
        "amp ({path}): NVIDIA Apex AMP integration has been removed. Use DeepSpeed 'fp16', "
        '\'bf16\', or \'torch_autocast\' instead. Remove it: set "bf16": {"enabled": "auto"}',
    ),
    "the compression library": (
        {**BATCH, "compression_training": {"layer_reduction": {"enabled": True}}},
        "compression_training ({path}): The DeepSpeed compression library has been removed.",
    ),
    "1-bit Adam": (
        {
            **BATCH,
            "optimizer": {
                "type": "OneBitAdam",
                "params": {"lr": 4e-4, "freeze_step": 23000, "comm_backend_name": "nccl"},
            },
        },
        "optimizer.type is 'OneBitAdam' ({path}), which is not built here: set it to one of AdamW",
    ),
}


def plan_of(tmp_path, ds: Json) -> tuple[Plan, str]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds, indent=2))
    world = World(0, 8, 0, 8, "torch", "cuda", "NVIDIA H100 80GB HBM3")
    return plan_from(parse_command(["--deepspeed", str(path)]), {}, world), str(path)


@pytest.mark.parametrize("name", PASS)
def test_a_json_as_people_have_it_passes_unchanged(tmp_path, name):
    ds, note = PASS[name]
    plan, _ = plan_of(tmp_path, ds)
    assert '"auto"' not in json.dumps({**plan.deepspeed, "zero_optimization": {}})
    kinds = {"adopted", "fallback", "changed"}
    notes = [row for row in describe(plan).splitlines() if row.startswith("note ")]
    if note is None:
        assert {event["kind"] for event in plan.events} <= kinds, notes
    else:
        assert any(note in row for row in notes), notes


@pytest.mark.parametrize("name", REFUSED)
def test_a_json_that_is_refused_says_what_to_write_instead(tmp_path, name):
    ds, said = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        plan_of(tmp_path, ds)
    (problem,) = caught.value.problems
    assert problem.startswith(said.replace("{path}", str(tmp_path / "ds.json")))
