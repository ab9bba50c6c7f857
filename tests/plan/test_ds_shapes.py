"""DeepSpeed JSONs in common use: one of each kind, in the style of the projects named, that pass
unchanged; their monitors; and runs on two ranks. Refusals are in refusals/json.toml. Of 140
real files with 'auto' from 29 public repositories, 130 pass; these examples have their keys.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.launch.fork_server import Zygote
from harness.run.dry_run import describe
from harness.runfolder import RunFolder
from tests.engine.small import MODEL
from tests.plan.conftest import Packages
from tests.plan.plans import Planner
from tests.real_runs import SHORT_RUN, SMALL_MODEL, events
from tests.shipped import ADAMW, FP16, WARMUP, ZERO_3

Json = dict[str, Any]
H100 = "RANKS=8 GPU='NVIDIA H100 80GB HBM3'"
WARMUP_DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": "auto"}}
SIZES = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
BATCH = {**SIZES, "gradient_clipping": "auto"}
BF16 = {"bf16": {"enabled": True}}
AUTO_BF16 = {"bf16": {"enabled": "auto"}, "fp16": FP16}
AUTO = {**AUTO_BF16, **BATCH}
TRAINER = {"optimizer": ADAMW, "scheduler": WARMUP}
CPU = {"device": "cpu", "pin_memory": True}
OFFLOADED = {"offload_optimizer": CPU, "offload_param": CPU}
NOWHERE = {"device": "none", "nvme_path": None}
GATHER = "gather_16bit_weights_on_model_save"


def zero(stage: int, **more: Any) -> Json:
    return {"zero_optimization": {"stage": stage, **more}}


def stage_2(**more: Any) -> Json:
    return zero(**{
        "stage": 2,
        **dict.fromkeys(("allgather_partitions", "overlap_comm", "reduce_scatter"), True),
        **dict.fromkeys(("allgather_bucket_size", "reduce_bucket_size"), 5e8),
        "contiguous_gradients": True,
        **more,
    })  # fmt: skip


def stage_3(**more: Any) -> Json:
    return zero(**{**ZERO_3, **more})


STAGE_0 = "zero_optimization.stage is 1, not 0"

# Name -> the JSON, and text of a note in its plan; None if it has none of its own.
# fmt: off
PASS: dict[str, tuple[Json, str | None]] = {
    "trainer, stage 2": ({**AUTO, **stage_2()}, None),
    "trainer, stage 3, offload": (
        {**AUTO, **TRAINER, **stage_3(**OFFLOADED), "steps_per_print": 2000,
         "wall_clock_breakdown": False},
        None),
    "LLaMA-Factory, AutoTP": ({**AUTO, **stage_2(), "tensor_parallel": {"autotp_size": 2}}, None),
    "LLaMA-Factory, stage 0": (
        {**AUTO, "zero_allow_untested_optimizer": True,
         **stage_2(stage=0, round_robin_gradients=True)},
        STAGE_0),
    "LLaMA-Factory, offload, keys that DeepSpeed never reads": (
        {**AUTO, "zero_force_ds_cpu_optimizer": False, **stage_3(offload_optimizer=CPU),
         "comms_config": {"verbose": False}, "monitor_config": {"enabled": True, "tag": "mine"}},
        "comms_config, monitor_config ("),
    "axolotl, stage 3, the fields' own names": (
        {**zero(3, overlap_comm=True, contiguous_gradients=True, sub_group_size=0,
                reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto",
                stage3_param_persistence_threshold="auto", max_live_parameters=0,
                max_reuse_distance=0, **{GATHER: True}),
         **BF16, "fp16": {**FP16, "auto_cast": False}, **BATCH, "wall_clock_breakdown": False},
        None),
    "LLaVA-NeXT, stage 2, weights offloaded": (
        {**AUTO, **stage_2(**OFFLOADED)}, "zero_optimization.offload_param.device is 'none', not"),
    "FlagEmbedding, bf16 with fp16's keys": (
        {**AUTO_BF16, "bf16": dict(FP16), **BATCH, "optimizer": ADAMW, "scheduler": WARMUP_DECAY,
         **zero(1, reduce_bucket_size=5e8)},
        "bf16 has no loss scale"),
    "BELLE, bfloat16": ({"bfloat16": {"enabled": "auto"}, **BATCH, **stage_3()}, None),
    "trlx, Apex in fp16": (
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto",
         "fp16": {"enabled": True, "min_loss_scale": 1, "opt_level": "O2"},
         **zero(2, offload_optimizer={"device": "cpu"}), "optimizer": ADAMW},
        "it was for Apex AMP"),
    "InternVL, buckets and threads": (
        {**zero(3, overlap_comm=True, contiguous_gradients=True, sub_group_size=1e9,
                reduce_bucket_size=1e9, stage3_prefetch_bucket_size=1e7,
                stage3_param_persistence_threshold=1e5, stage3_max_live_parameters=1e9,
                stage3_max_reuse_distance=1e9, **{f"stage3_{GATHER}": True}),
         "fp16": {**FP16, "auto_cast": True}, "bf16": {"enabled": "auto"}, **BATCH,
         "optimizer": ADAMW, "wall_clock_breakdown": True},
        None),
    "alignment-handbook, as accelerate writes it": (
        {**SIZES,
         **zero(3, offload_optimizer=NOWHERE, offload_param=NOWHERE, **{f"stage3_{GATHER}": True}),
         "gradient_clipping": "auto", "steps_per_print": float(2**31), **BF16,
         "fp16": {"enabled": False}},
        None),
    "DeepSpeed-Chat, without the engine for two": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
         **zero(3, offload_param={"device": "none"}, offload_optimizer={"device": "none"},
                stage3_param_persistence_threshold=1e4, stage3_max_live_parameters=3e7,
                stage3_prefetch_bucket_size=3e7, memory_efficient_linear=False),
         **BF16, "gradient_clipping": 1.0, "prescale_gradients": False,
         "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
         "tensorboard": {"enabled": False, "output_path": "tb", "job_name": "x"}},
        None),
    "LLaVA-NeXT, ZeRO++": (
        {**AUTO, **stage_3(zero_quantized_weights=True, zero_hpz_partition_size=8,
                           zero_quantized_gradients=True)},
        None),
    "BELLE, profiled": (
        {**AUTO, **stage_2(),
         "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1,
                            "top_modules": 1, "detailed": True, "output_file": None}},
        None),
    "comments and what was removed": (
        {"_comment": "from the wiki", **AUTO, **stage_2(),
         "amp": {"enabled": "auto", "opt_level": "auto"},
         "curriculum_learning": {"enabled": False}},
        "amp, curriculum_learning ("),
    "DeepSpeedExamples, autotuning": (
        {**AUTO, "autotuning": {"enabled": True, "fast": False}},
        "autotuning.enabled is False, not True"),
    "as old as ZeRO-Offload": (
        {**BATCH, "fp16": FP16, **zero(2, cpu_offload=True)},
        'read as "offload_optimizer": {"device": "cpu"}'),
    "DeepSpeed's example of bf16 masters": (
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
         "optimizer": {
             "type": "AdamW",
             "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
         "bf16": {"enabled": True, "bf16_master_weights_and_grads": True,
                  "bf16_optimizer_states": True},
         **zero(3, stage3_param_persistence_threshold=0),
         "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}},
        "train.global_batch = 32, from the JSON's gradient_accumulation_steps"),
}
# fmt: on


@pytest.mark.parametrize("name", PASS)
def test_a_json_as_people_have_it_passes_unchanged(name: str, planned: Planner) -> None:
    ds, note = PASS[name]
    plan = planned(H100, ds)
    assert '"auto"' not in json.dumps({**plan.deepspeed, "zero_optimization": {}})
    kinds = {"adopted", "fallback", "changed", "chosen"}
    notes = [row for row in describe(plan).splitlines() if row.startswith("note ")]
    if note is None:
        assert {event["kind"] for event in plan.events} <= kinds, notes
    else:
        assert any(note in row for row in notes), notes


PACKAGES = ("tensorboard", "wandb", "mlflow", "comet_ml")


def test_missing_packages_are_problems_of_one_report(packages: Packages, planned: Planner) -> None:
    packages(*PACKAGES, none=True)
    monitors = {"tensorboard": {"enabled": True, "output_path": "x"}, "comet": {"enabled": True}}
    words = "log.tensorboard=true log.wandb=p log.mlflow=e"
    assert set(planned.problems(words, monitors)) == {
        f"{key}: it needs the package {package}: pip install {package}"
        for key, package in (
            ("log.tensorboard is True", "tensorboard"),
            ("log.wandb is 'p'", "wandb"),
            ("log.mlflow is 'e'", "mlflow-skinny"),
            ("tensorboard.enabled is True ($ds.json)", "tensorboard"),
            ("comet.enabled is True ($ds.json)", "comet_ml"),
        )
    }
    made = planned("", {"tensorboard": {"enabled": False}})
    assert made.config.log.tensorboard is False


def test_a_monitor_without_a_place_of_its_own_becomes_a_tracker(
    packages: Packages, planned: Planner
) -> None:
    packages(*PACKAGES)
    ds = {"tensorboard": {"enabled": True}, "wandb": {"enabled": True, "project": "p", "team": "t"}}
    made = planned("", ds)
    assert (made.config.log.tensorboard, made.config.log.wandb) == (True, "t/p")
    assert not made.deepspeed["tensorboard"]["enabled"]
    assert not made.deepspeed["wandb"]["enabled"]
    notes = "\n".join(planned.notes("", ds))
    assert "tensorboard.enabled is False, not True" in notes
    assert "log.wandb=t/p" in notes
    # The user's own tracker has priority and is written once.
    made = planned("log.wandb=mine", {"wandb": {"enabled": True}})
    assert (made.config.log.wandb, made.deepspeed["wandb"]["enabled"]) == ("mine", False)


def test_a_monitor_with_a_place_of_its_own_stays_deepspeeds(
    packages: Packages, planned: Planner
) -> None:
    packages(*PACKAGES)
    ds = {
        "tensorboard": {"enabled": True, "output_path": "/logs"},
        "wandb": {"enabled": True, "group": "g"},
        "csv_monitor": {"enabled": True, "output_path": "csv"},
    }
    made = planned("", ds)
    assert {name: made.deepspeed[name] for name in ds} == ds
    assert (made.config.log.tensorboard, made.config.log.wandb) == (False, None)


IN_BF16 = {"enabled": True}
BF16_STATES = {**IN_BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def trained(
    zygote: Zygote, folder: Path, data: list[str], ds: dict[str, Any]
) -> tuple[list[float], RunFolder]:
    """Return the losses of three steps with a JSON, and the run folder."""
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(ds))
    words = [*SMALL_MODEL, *SHORT_RUN, "train.steps=3", "ds.bf16.enabled=true"]
    words += [*data, f"run.dir={folder / 'run'}"]
    ended = zygote.run(["--deepspeed", str(folder / "ds.json"), *words], folder / "logs")
    assert ended.codes == [0, 0], ended.output
    run = RunFolder(folder / "run")
    return [line["loss"] for line in run.read_metrics() if line.get("loss") is not None], run


@pytest.mark.gate("plan")
def test_torch_autocast_to_bf16_over_bf16_changes_nothing(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    """DeepSpeed's own example of master weights in bf16 has both."""
    ds = {"bf16": BF16_STATES, "zero_optimization": {"stage": 3}}
    losses, _ = trained(zygote, tmp_path / "without", data, ds)
    autocast = {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}
    with_autocast, run = trained(zygote, tmp_path / "with", data, ds | autocast)
    plan = run.read_plan()
    assert plan["deepspeed"]["torch_autocast"]["enabled"]
    assert len(losses) == 3
    assert with_autocast == losses


@pytest.mark.gate("plan")
def test_stage_0_in_bf16_is_stage_1_and_an_event(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    ds = {"bf16": IN_BF16, "zero_optimization": {"stage": 0}}
    losses, run = trained(zygote, tmp_path / "zero", data, ds)
    (event,) = events(run, "changed")
    assert event["json_key"] == "zero_optimization.stage"
    ds = {"bf16": IN_BF16, "zero_optimization": {"stage": 1}}
    assert losses == trained(zygote, tmp_path / "one", data, ds)[0]


@pytest.mark.parametrize("mistake", ["a value that transformers refuses", "a pointer for weights"])
def test_late_ds_problems_are_one_report_before_building(
    mistake: str, zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    words = [*data, *SMALL_MODEL, *SHORT_RUN, f"run.dir={tmp_path / 'run'}"]
    if mistake == "a pointer for weights":
        pointer = tmp_path / "model.safetensors"
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n")
        words = [word for word in words if not word.startswith("model.")]
        words += [f"model.name={tmp_path}", f"model.init_from={tmp_path}"]
        expected = f"{pointer} has {pointer.stat().st_size} bytes"
    else:
        words += ["model.overrides.hidden_act=silu_"]
        expected = "cannot train: model.name=tiny: transformers cannot build it"
    ended = zygote.run(words, tmp_path / "logs")
    assert ended.codes == [2, 2], ended.output
    for output in ended.outputs:
        assert expected in output
        assert "Traceback" not in output
    assert not (tmp_path / "run").exists()
