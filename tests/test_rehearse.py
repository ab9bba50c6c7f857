"""rehearse.py: the small version of a job; a rehearsal passes, and can fail."""

import json
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from harness.config.ds_json import read_ds_json
from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.files.corpus import find_corpus
from harness.launch.ranks import ON_CPU, Ranks, ending
from harness.layout.families import FAMILIES
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from harness.layout.world import World
from harness.models.skeleton import hf_config, skeleton
from harness.plan.command import parse_command, plan_from
from harness.plan.model_config import find_model_config, preset_names
from tests.real_runs import fill, imported, start
from tests.run_tools import run_tool
from tests.shipped import DS_CONFIGS, ranks_with_experts
from tests.tables import beside
from tools import rehearse
from tools.rehearsal import stages as stages_of_it
from tools.rehearsal.job import STEPS, Job, elsewhere, grid_of, rehearsed
from tools.rehearsal.shrink import LAYERS as LAYER_KEYS
from tools.rehearsal.shrink import MOST_BYTES, VOCAB_SIZE, data_keys, excerpt, shrunk, size_of
from tools.rehearsal.stages import Done, Rehearsal, apart, differing, done_twice, train_command

MOST_PARAMETERS = 8_000_000  # sixteen heads per key head make Llama-3.1-405B the largest
LAYERS = 4
TABLES = beside(__file__, "rehearse.toml")


def job(
    *arguments: str, gpus: int = 8, json_name: str = "zero3.json", ranks: int | None = None
) -> Job:
    """Return the rehearsal that the command line requests."""
    command = parse_command(["--deepspeed", str(DS_CONFIGS / json_name), *arguments])
    world = World(world_size=gpus, local_world_size=gpus, accelerator="cuda")
    return Job.of(plan_from(command, world=world), ranks)


def cpu(ranks: int) -> World:
    """Return a world of CPU ranks."""
    return World(world_size=ranks, local_world_size=ranks)


def small_parameters(config: dict[str, Any]) -> int:
    """Return the parameters of the model that transformers builds, without weights."""
    return skeleton(hf_config(config), torch.float32, "eager").num_parameters()


def assert_same_kind(small: dict[str, Any], large: dict[str, Any]) -> None:
    one, other = Shape.from_hf(small), Shape.from_hf(large)
    assert (one.num_kv_heads == 1) == (other.num_kv_heads == 1)
    if "multi_query" not in large:  # Falcon's key for a single key head, however many queries
        assert one.num_heads // one.num_kv_heads == other.num_heads // other.num_kv_heads
    assert one.tied == other.tied
    assert bool(one.num_experts) == bool(other.num_experts)
    chooses = [s.num_experts > s.experts_per_token for s in (one, other)]
    assert chooses[0] == chooses[1]
    assert (one.q_size == one.hidden_size) == (other.q_size == other.hidden_size)
    assert one.num_layers == min(LAYERS, other.num_layers)
    assert {w is None for w in one.sliding_windows} == {w is None for w in other.sliding_windows}
    kinds = [[t.name for layer in s.body.layers[:2] for t in layer] for s in (one, other)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    "name", [n for n in preset_names() if find_model_config(n)[0]["model_type"] in FAMILIES]
)
def test_a_shrunken_preset_is_small_and_of_its_kind(name: str) -> None:
    large, _ = find_model_config(name)
    small = shrunk(large, LAYERS, VOCAB_SIZE)
    assert small_parameters(small) < MOST_PARAMETERS
    assert_same_kind(small, large)


@pytest.mark.parametrize("filled", [False, True], ids=["sparse", "filled_in"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shrinks_from_its_default_sizes(family: str, filled: bool) -> None:
    """Also from a minimal config.json."""
    kept = ("model_type", "vocab_size", "tie_word_embeddings", "num_experts", "num_local_experts")
    kept += ("ffn_dim", "multi_query")
    ends = ("_size", "_heads", "_layers", "_per_tok", "_embd", "_head", "_layer", "_positions")
    ends += ("_embeddings",)
    whole = AutoConfig.for_model(family).to_dict()
    if not filled:
        whole.pop("num_key_value_heads", None)
    large = {k: v for k, v in whole.items() if filled or k in kept or k.endswith(ends)}
    small = shrunk(large, LAYERS, VOCAB_SIZE)
    assert small_parameters(small) < MOST_PARAMETERS
    assert_same_kind(small, large)


def test_shrunk_model_keeps_every_layer_kind() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    large = {**AutoConfig.for_model("qwen3").to_dict(), "num_hidden_layers": 24}
    large |= {"layer_types": kinds * 4, "use_sliding_window": True, "sliding_window": 4096}
    small = shrunk(large, LAYERS, VOCAB_SIZE)
    assert small["num_hidden_layers"] == 6
    assert small["layer_types"] == kinds
    assert set(Shape.from_hf(small).sliding_windows) == {16, None}
    for first, shown in ((24, 6), (20, 1), (0, 0)):  # the first layer that slides
        changed = shrunk(large | {"max_window_layers": first}, LAYERS, VOCAB_SIZE)
        assert changed["max_window_layers"] == shown
    assert small_parameters(small) < MOST_PARAMETERS


def test_shrunk_model_cuts_longrope_factors_with_the_head() -> None:
    large = AutoConfig.for_model("phi3").to_dict() | {"max_position_embeddings": 131072}
    large["original_max_position_embeddings"] = 4096
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    large["rope_parameters"] = {**(large.get("rope_parameters") or {}), **factors}
    small = shrunk(large, LAYERS, VOCAB_SIZE)
    assert len(small["rope_parameters"]["long_factor"]) == 64 // small["num_attention_heads"] // 2
    assert small_parameters(small) < MOST_PARAMETERS


@pytest.mark.parametrize(("keys", "problem"), TABLES["models"])
def test_a_model_that_cannot_be_shrunk_says_why(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        shrunk({"model_type": "new", **keys}, LAYERS, VOCAB_SIZE)


@pytest.mark.parametrize(("sizes", "ranks", "expected"), TABLES["ranks"])
def test_rehearsal_keeps_stages_and_reduces_data_ranks(
    sizes: dict[str, int], ranks: int | None, expected: list[int] | str
) -> None:
    grid = Grid(**sizes)
    if isinstance(expected, list):
        assert rehearsed(grid, ranks) == grid_of(*expected)
    else:
        with pytest.raises(ConfigError, match=expected):
            rehearsed(grid, ranks)


@pytest.mark.parametrize(("sizes", "micro", "accum", "ranks", "micro_there"), TABLES["layouts"])
def test_another_layout_takes_the_same_batch(
    sizes: list[int], micro: int, accum: int, ranks: int, micro_there: int
) -> None:
    layout = grid_of(*sizes)
    replacement = elsewhere(layout, micro, accum)
    assert replacement == ((grid_of(1, ranks), micro_there) if ranks else None)
    if ranks:
        assert (micro * accum * layout.data) % (micro_there * ranks) == 0


@pytest.mark.parametrize("name", sorted(path.name for path in DS_CONFIGS.glob("*.json")))
@pytest.mark.parametrize("preset", ["llama-3-8b", "mixtral-8x7b", "gpt2-124m"])
def test_rehearsal_of_each_shipped_json_is_planned(name: str, preset: str, tmp_path: Path) -> None:
    arguments = [f"model.name={preset}"]
    if ranks_with_experts(read_ds_json(DS_CONFIGS / name)) > 1 and preset != "mixtral-8x7b":
        pytest.skip("has no experts to divide")
    if preset == "gpt2-124m":
        arguments.append("model.overrides.n_head=16")  # which eight ranks share
    made = job(*arguments, json_name=name)
    command = parse_command([*made.write(tmp_path / "made"), f"run.dir={tmp_path / 'run'}"])
    plan = plan_from(command, world=cpu(made.layout.world_size))
    assert plan.precision == made.real.precision
    assert plan.zero_stage == made.real.zero_stage
    assert plan.grid.pipeline == made.real.grid.pipeline
    assert plan.grid.tensor == made.real.grid.tensor
    assert plan.grid.sequence == min(made.real.grid.sequence, 2)
    assert plan.grid.expert == min(made.real.grid.expert, 2)
    assert (plan.grad_accum > 1) == (made.real.grad_accum > 1)
    assert (plan.steps, plan.global_batch) == (STEPS, made.global_batch)
    assert made.other
    other = parse_command([*made.write(tmp_path / "other"), *made.at_the_other()])
    there = plan_from(other, world=cpu(made.other[0].world_size))
    assert there.global_batch == plan.global_batch
    assert there.world.world_size != plan.world.world_size


def test_the_job_is_kept_but_for_its_size(tmp_path: Path) -> None:
    ds = json.loads((DS_CONFIGS / "zero3.json").read_text())
    ds |= {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9000}}}
    ds["scheduler"]["params"] |= {"warmup_num_steps": 500, "warmup_max_lr": 1e-4}
    ds |= {"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9]}}}
    ds |= {"wandb": {"enabled": True}, "train_micro_batch_size_per_gpu": 4}
    (tmp_path / "job.json").write_text(json.dumps(ds))
    made = job(
        *("--deepspeed", str(tmp_path / "job.json"), "model.name=gpt2-124m"),
        *("model.overrides.n_layer=3", "model.dropout=0.2", "train.global_batch=256"),
        *("guard.spikes=rollback", "save.every=500", "save.async=true", "model.compile=auto"),
    )
    assert "model.compile" not in made._kept()
    command = parse_command(made.write(tmp_path / "made"))
    plan = plan_from(command, world=cpu(4))
    run = plan.config
    assert (run.optim.name, run.optim.betas, run.optim.lr) == ("adamw", (0.8, 0.9), 1e-4)
    assert (run.optim.schedule, run.optim.warmup_type) == ("linear", "log")
    assert run.optim.warmup_steps == 2
    assert (run.guard.spikes, run.save.every, run.save.async_) == ("rollback", 4, True)
    assert (plan.steps, plan.micro_batch, plan.grad_accum) == (STEPS, 2, 2)
    assert (plan.model_config["attn_pdrop"], size_of(plan.model_config, LAYER_KEYS)) == (0.2, 2)
    assert made.random_steps
    assert not plan.deepspeed["wandb"]["enabled"]
    assert "the JSON's wandb" in made.not_rehearsed()


def test_rehearsal_keeps_ramps_optimizer_and_groups(tmp_path: Path) -> None:
    made = job(
        "model.name=llama-1b",
        *("train.global_batch=64", "data.seq_len=2048", "train.micro_batch=2", "optim.name=muon"),
        *("ramp.batch_from=16", "ramp.batch_tokens=1000000000", "ramp.length_from=256"),
        *("ramp.length_tokens=500000000", "train.steps=1000"),
        *("profile.steps=100:103", "eval.patience=3"),
        'optim.groups=[{pattern="lm_head|embed", lr_multiplier=0.1}, {pattern="layers.15."}]',
        gpus=8,
    )
    command = parse_command(made.write(tmp_path / "small"))
    plan = plan_from(command, world=cpu(made.layout.world_size))
    steps = list(islice(plan.curriculum.walk(0), STEPS))
    assert steps[0].global_batch < steps[-1].global_batch == made.global_batch
    assert steps[0].pieces == 2
    assert steps[-1].pieces == 1
    assert [rule.pattern for rule in plan.config.optim.groups] == ["lm_head|embed"]
    assert plan.config.optim.name == "muon"


def test_a_model_that_brings_weights_brings_its_tokenizer_alone(tmp_path: Path) -> None:
    (weights := tmp_path / "weights").mkdir()
    (weights / "config.json").write_text(json.dumps(find_model_config("llama-3-8b")[0]))
    made = job(f"model.name={weights}", f"model.init_from={weights}", "optim.lr=1e-5")
    arguments = made.write(tmp_path / "made")
    assert f'data.tokenizer="{weights}"' in arguments
    assert not [argument for argument in arguments if "init_from" in argument]
    assert made.model["vocab_size"] == 128256  # whatever ids it gives
    assert "the weights of model.init_from" in made.not_rehearsed()


@pytest.mark.parametrize(("gpus", "json_name", "words"), TABLES["jobs"])
def test_trainable_job_is_accepted(gpus: int, json_name: str, words: str, tmp_path: Path) -> None:
    """Neither in its own layout nor in the other one."""
    settings = words.split()
    if "model.lora.rank=16" in settings:
        config = find_model_config("llama-3-8b")[0] | {"vocab_size": 512}
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "config.json").write_text(json.dumps(config))
        settings = [*settings, f"model.init_from={tmp_path / 'weights'}"]
    made = job(*settings, gpus=gpus, json_name=json_name)
    arguments = Rehearsal(made, tmp_path / "made").arguments
    assert made.other
    liger = made.real.config.model.kernels == "liger"
    assert ("model.kernels=liger" in made.not_rehearsed()) == liger
    assert ("model.lora.rank=16" in arguments) == ("model.lora.rank=16" in settings)
    assert made.random_steps == bool(re.search("dropout|depth", words))


def test_small_job_error_is_named_as_the_rehearsal_own(tmp_path: Path) -> None:
    made = job("model.name=llama-3-8b", json_name="tensor2_zero1.json")
    broken = replace(made, model={**made.model, "intermediate_size": 63})
    message = r"not the rehearsal's own small job: .* 63 "
    with pytest.raises(stages_of_it.StageFailed, match=message) as failed:
        Rehearsal(broken, tmp_path / "made")
    assert (failed.value.stage, failed.value.code) == ("plan", 1)


def test_zero_3_partitions_the_small_model_as_the_large() -> None:
    keys = ("stage3_max_live_parameters=1e9", "stage3_param_persistence_threshold=100000")
    zero, literal = (job("model.name=llama-3-8b", f"ds.zero_optimization.{key}") for key in keys)
    sizes = zero.deepspeed["zero_optimization"]
    assert sizes["reduce_bucket_size"] == "auto"  # it follows the model anyway
    hidden = zero.model["hidden_size"]
    assert sizes["stage3_max_live_parameters"] == int(1e9 * (hidden / 4096) ** 2)

    threshold = literal.deepspeed["zero_optimization"]["stage3_param_persistence_threshold"]
    assert hidden < threshold < hidden**2  # norms stay whole, matrices are partitioned


def test_layers_per_stage_keep_their_proportion() -> None:
    words = ("model.name=llama-1b", "ds.pipeline.partition=[12,4]")
    made = job(*words, gpus=2, json_name="pipeline2.json")
    assert made.deepspeed["pipeline"]["partition"] == [3, 1]
    assert made.model["num_hidden_layers"] == 4


LINE = json.dumps({"text": "word " * 200}) + "\n"


@pytest.mark.parametrize("split", [None, "test"])
def test_excerpt_has_first_lines_of_files_of_the_split(tmp_path: Path, split: str | None) -> None:
    names = ["test.jsonl", "train.jsonl"] if split else ["large.jsonl"]
    (tmp_path / "data").mkdir()
    for name in names:
        (tmp_path / "data" / name).write_text(LINE * (2 * MOST_BYTES // len(LINE)))
    path = tmp_path / "data" / ("" if split else "large.jsonl")
    part = Path(excerpt(str(path), tmp_path / "part", split=split))
    assert part == tmp_path / "part" / ("" if split else "large.jsonl.jsonl")
    (file,) = (tmp_path / "part").iterdir()
    assert file.name == f"{names[0]}.jsonl"
    assert MOST_BYTES <= file.stat().st_size < MOST_BYTES + len(LINE)
    assert set(file.read_text().splitlines(keepends=True)) == {LINE}


def test_excerpt_takes_a_part_of_each_file(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for number in range(8):
        (folder / f"{number}").mkdir(parents=True)
        (folder / f"{number}" / "a.txt").write_text("a line\n" * (MOST_BYTES // 28))
    part = Path(excerpt(str(folder), tmp_path / "part"))
    files = sorted(part.rglob("*.txt"))
    assert [file.relative_to(part).parts for file in files] == [(str(n), "a.txt") for n in range(8)]
    assert sum(file.stat().st_size for file in files) == pytest.approx(MOST_BYTES, rel=0.01)


@pytest.mark.parametrize("format", [None, "csv"])
def test_copied_records_are_read_as_json_lines(tmp_path: Path, format: str | None) -> None:
    name = "large.psv" if format else "large.csv"
    lines = (f'"{number}, word {"word " * 200}",{number}\n' for number in range(9000))
    (tmp_path / name).write_text("text,number\n" + "".join(lines))
    settings = [f"data.path={tmp_path / name}", *([f"data.format={format}"] if format else [])]
    plan: Any = SimpleNamespace(config=load_run_config(None, settings))
    keys = data_keys(plan, tmp_path / "part")
    words = [f"{key}={value}" for key, value in keys.items()]
    data = load_run_config(None, words).data
    pieces = find_corpus(data.path, data.format, split=data.split).pieces()
    assert [piece.text.split(",")[0] for piece in pieces][:3] == ["0", "1", "2"]


def test_excerpt_reads_small_data_in_place(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("a line\n")
    assert excerpt(str(tmp_path / "small.txt"), tmp_path / "part") == str(tmp_path / "small.txt")
    for split in ("test", "train"):
        (tmp_path / "divided" / split).mkdir(parents=True)
        (tmp_path / "divided" / split / "0.txt").write_text("a line\n")
    first, second = (f'{{path="{tmp_path}/divided", name="{name}"' for name in "ab")
    mix = f'data.mix=[{first}, split="test"}}, {second}}}]'
    words = [mix, "data.split=train", f"data.eval_path={tmp_path}/small.txt"]
    plan: Any = SimpleNamespace(config=load_run_config(None, words))
    made = data_keys(plan, tmp_path / "part")
    assert [source["split"] for source in made["data.mix"]] == ["test", "train"]
    assert made["data.eval_path"] == f"{tmp_path}/small.txt"
    with pytest.raises(ConfigError, match=r"gone.txt does not exist"):
        excerpt(str(tmp_path / "gone.txt"), tmp_path / "part")


def lines(*losses: float | str, stopped_at: int = 9) -> list[dict[str, Any]]:
    return [{"step": 0, "attempt": 1, "eval_loss": 9.0}] + [
        {"step": step, "attempt": 1 + (step > stopped_at), "loss": loss, "grad_norm": 1.0}
        for step, loss in enumerate(losses, 1)
    ]


def test_one_bit_or_missing_or_repeated_step_is_a_difference() -> None:
    expected = lines(3.0, 2.0, 1.0)
    assert differing(lines(3.0, 2.0, 1.0, stopped_at=2), expected) == []
    assert differing(lines(3.0, 2.0 + 2**-40, 1.0), expected)[0].startswith("loss of step 2 is")
    assert differing(lines(3.0, 2.0), expected) == ["step 3 is in only one of the two runs"]
    assert done_twice(lines(3.0, 2.0, 1.0, stopped_at=2), 2) == []
    assert done_twice(lines(3.0, 2.0, 1.0, stopped_at=1), 2) == [2]


@pytest.mark.parametrize(("stage", "losses", "at", "why"), TABLES["curves"])
def test_a_stage_fails_for_another_curve(stage: str, losses: Any, at: int, why: str) -> None:
    own = {"job.other": (Grid(1), 2), "job.random_steps": False, "job.real.precision": "fp32"}
    made = mock.MagicMock(stopped_at=4, **own)
    made.reference.read_metrics.return_value = lines(*[3.0] * STEPS)
    for run in (made.resumed, made.moved):
        run.read_metrics.return_value = lines(*losses, stopped_at=at)
    with pytest.raises(stages_of_it.StageFailed, match=why):
        getattr(Rehearsal, stage)(made)


def test_nonfinite_losses_count_as_apart() -> None:
    expected = lines(3.0, 2.0, 1.0)
    assert apart(lines(3.0, 2.02, 5.0), expected, [1, 2], "loss") == pytest.approx(0.01)
    assert not apart(lines(3.0), expected, [1, 2], "loss") <= 1e9
    for loss in ("inf", "nan", None):  # as records have them
        assert not apart(lines(loss, 2.0), expected, [1], "loss") <= 1e9
        assert not apart(expected, lines(loss, 2.0), [1], "loss") <= 1e9


def test_missing_data_fails_the_rehearsal_at_plan() -> None:
    done = run_tool("rehearse", "--gpus", "8", "data.path=gone.txt", code=2)
    assert "FAILED at plan: data.path: gone.txt does not exist" in done.stdout


def test_a_full_disk_is_no_mistake_of_the_job(small_disk: Path) -> None:
    fill(small_disk)
    done = run_tool("rehearse", "--gpus", "8", f"--folder={small_disk}", code=1)
    assert "FAILED at plan: " in done.stdout
    assert "No space left on device" in done.stdout
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_dry_run_says_what_would_be_rehearsed() -> None:
    asked = ("--dry-run", "--gpus", "64", "--deepspeed", "ds_configs/pipeline4.json")
    done = run_tool("rehearse", *asked, "train.global_batch=256", "model.name=mixtral-8x7b")
    assert "8 ranks = 4 stages x 2 data, a mixtral of" in done.stdout
    assert "64 GPUs = 4 stages x 16 data, ZeRO 1, bf16, 256 windows per step" in done.stdout
    assert re.search(r"^it would take about \d+ min .*\(guessed\)$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(("memory_mib", "more", "ranks"), TABLES["gpus"])
def test_ranks_that_fit_a_gpu_rehearse_on_it(
    memory_mib: int, more: list[str], ranks: str | None, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    gpu = "GPU 0: NVIDIA H200 (UUID: GPU-01ab)"
    tool.write_text(f"#!/bin/sh\ncase $1 in --list*) echo '{gpu}';; *) echo {memory_mib};; esac\n")
    tool.chmod(0o755)
    words = ("--device", "cuda", "--dry-run", "--gpus", "16", "--deepspeed", "ds_configs/3d.json")
    words += ("model.name=llama-3-8b", *more)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = run_tool("rehearse", *words, code=0 if ranks else 2, PATH=path)
    if ranks:
        assert f"rehearsing 3d.json as {ranks}, a llama" in done.stdout
    else:
        assert re.search(r"--device cuda: 8 ranks = .* are needed, but \d fit", done.stderr)


def test_on_gpus_kernels_and_attention_stay_and_ranks_may_share(tmp_path: Path) -> None:
    asked = ("model.kernels=liger", "model.attention=flash_attention_2", "model.name=llama-1b")
    on_cpu = job(*asked)
    on_gpu = replace(on_cpu, device="cuda")
    kept = ['model.kernels="liger"', 'model.attention="flash_attention_2"']
    for made, expected in ((on_cpu, []), (on_gpu, kept)):
        (tmp_path / made.device).mkdir()
        arguments = made.write(tmp_path / made.device)
        assert [word for word in kept if word in arguments] == expected
    assert {"CUDA", "NCCL"} <= {*on_cpu.not_rehearsed()}
    assert on_gpu.not_rehearsed()[0] == "links between GPUs"
    assert not {"CUDA", "NCCL", "model.kernels=liger"} & {*on_gpu.not_rehearsed()}
    assert stages_of_it.ENVIRONMENTS["cuda"]["HARNESS_SHARE_GPU"] == "1"


def test_all_takes_a_mixture_where_a_json_divides_experts() -> None:
    asked = ("--all", "--dry-run", "--gpus", 8, "--ranks", 2, "data.seq_len=64")
    only = ("--only", "moe_expert8.json", "--only", "zero1.json")
    done = run_tool("rehearse", *asked, *only, "model.name=llama-3-8b")
    assert "moe_expert8.json shards experts, which this model lacks" in done.stdout
    assert re.search(r"rehearsing moe_expert8.json as 2 ranks, a mixtral of", done.stdout)
    assert re.search(r"rehearsing zero1.json as 2 ranks, a llama of", done.stdout)
    assert "2 of 2 rehearsals held" in done.stdout
    own = run_tool("rehearse", *asked, *only[:2], "model.name=qwen3-30b-a3b")
    assert "a qwen3_moe of" in own.stdout


def test_the_table_has_a_row_for_each_json() -> None:
    made = job("model.name=llama-1b")
    results = [
        rehearse.Result("b.json", made, [Done("plan", 2, "")]),
        rehearse.Result("c.json", made, [Done("plan", 4, "")], "train: x", "mixtral-8x7b"),
    ]
    table = rehearse.markdown(results, ["--all", "--folder", "a b"])
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows[0].startswith("| `b.json` | 8 | 4 ranks | bf16 | 2.0 | ")
    assert rows[1].startswith("| `c.json` with mixtral-8x7b | ")
    assert rows[1].endswith(" 4 | FAILED at train |")
    assert "    python tools/rehearse.py --all --folder 'a b'\n" in table
    assert table.endswith("All together: 6 s.\n")


def kept_folder(printed: str) -> Path:
    match = re.search(r"^kept: (.+)$", printed, re.MULTILINE)
    assert match, printed
    return Path(match[1])


def stages_in(printed: str) -> list[str]:
    return [line.split()[0] for line in printed.splitlines() if " s  " in line]


def test_crashed_stage_reports_its_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def planted(stage: str, arguments: list[str]) -> list[str]:
        return [sys.executable, "-c", "print('planted'); raise SystemExit(3)"]

    argv = ["--gpus", "2", f"--folder={tmp_path}", "--deepspeed", str(DS_CONFIGS / "zero1.json")]
    assert rehearse.main(argv, planted) == 1
    printed = capfd.readouterr()
    assert "FAILED at train: its ranks ended with [3, 3], not all with 0" in printed.out
    assert "last output of rank 0:\n  planted\n" in printed.err
    assert kept_folder(printed.out).parent == tmp_path


@pytest.mark.slow("five stages of a job")
def test_a_rehearsal_of_zero_3_holds(tmp_path, data: list[str], capfd, monkeypatch) -> None:
    monkeypatch.setattr(stages_of_it, "started", forked)
    argv = ["--deepspeed", str(DS_CONFIGS / "zero3.json"), "--gpus=8", "--ranks=2"]
    job = ["model.name=llama-3-8b", "train.global_batch=256", *data]
    code = rehearse.main([*argv, f"--folder={tmp_path}", *job])
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert stages_in(out) == ["plan", "train", "interrupt", "resume", "export", "elsewhere"]
    assert "8 GPUs, ZeRO 3, bf16, 256 windows per step = 8 x 4 accumulated x 8" in out
    assert "equal the uninterrupted run's in every step, bit for bit" in out
    assert re.search(r"opens in transformers; its probe loss is (\S+), and was \1", out)
    assert "resumes with 1 rank: loss and norm of steps" in out
    assert "all held in" in out
    assert not list(tmp_path.iterdir())


def forked(
    command: list[str], ranks: int, cwd: Path, logs: Path, env: Mapping[str, str]
) -> AbstractContextManager[Ranks]:
    """Start ranks as the rehearsal does, but with everything imported."""
    assert env == ON_CPU
    imported()
    return ending(partial(start, command, cwd, ranks, logs=logs))


def test_one_of_several_rehearsals_that_fails_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(asked: Any, *_: Any) -> tuple[rehearse.Result, int]:
        return rehearse.Result(asked.deepspeed_path.name), int("zero1" in str(asked.deepspeed_path))

    monkeypatch.setattr(rehearse, "_one", one)
    assert rehearse.main(["--all", "--only=zero2.json", "--only=zero3.json"]) == 0
    assert rehearse.main(["--all", "--only=zero1.json", "--only=zero3.json"]) == 1


@pytest.mark.gate("tools")
def test_another_seed_on_resume_is_detected(tmp_path, data: list[str], capfd, monkeypatch) -> None:
    monkeypatch.setattr(stages_of_it, "started", forked)

    def planted(stage: str, arguments: list[str]) -> list[str]:
        seed = ["train.seed=1", "resume.allow=train.seed"] if stage == "resume" else []
        return train_command(stage, [*arguments, *seed])

    argv = ["--deepspeed", str(DS_CONFIGS / "pipeline2.json"), "--gpus", "2", *data]
    code = rehearse.main([*argv, f"--folder={tmp_path}", "model.name=llama-1b"], planted)
    printed = capfd.readouterr()
    assert code == 1, printed.out + printed.err
    assert stages_in(printed.out) == ["plan", "train", "interrupt"]
    assert "2 ranks = 2 stages x 1 data, a llama of" in printed.out
    assert "SIGUSR1 to one rank: all ended with code 75" in printed.out
    assert "FAILED at resume: the resumed run is not the uninterrupted one: loss" in printed.out
    assert (kept_folder(printed.out) / "resumed" / "metrics.jsonl").exists()
