"""Runs that exceed this machine's memory are refused, with the changes that would help."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config
from harness.estimate import fit
from harness.estimate.host import CUDA_HOST, PROCESS_HOST
from harness.estimate.memory_item import GIB, as_size
from harness.estimate.timeline import Estimate
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from tests.estimate.runs import run_of


def plan(ds: dict[str, Any], accelerator: str = "cuda", **keys: Any) -> Plan:
    """Return the plan of two ranks; `allocators` and `torch` are the world's, others sections."""
    own = {key: keys.pop(key) for key in ("allocators", "torch") if key in keys}
    world = World(0, 2, 0, 2, accelerator=accelerator, gpu="h100-80", **own)
    return make_plan(RunConfig.model_validate(keys), ds, world)


def estimate(ds: dict[str, Any], accelerator: str = "cuda", **run: dict[str, Any]) -> Estimate:
    return plan(ds, accelerator, **run).estimate


LLAMA = {"model": {"name": "llama-1b"}, "data": {"seq_len": 1024}, "train": {"micro_batch": 8}}
STAGE_1: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
OFFLOADED = {"bf16": {"enabled": True}}
OFFLOADED |= {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize("free", [(79 * GIB, 500 * GIB), (None, None)])
def test_what_fits_or_is_not_measured_is_not_refused(free: tuple[int | None, int | None]) -> None:
    assert fit.shortages(estimate(STAGE_1, **LLAMA), *free) == []


def test_too_small_gpu_lists_need_and_fixes_that_fit() -> None:
    estimated = estimate(STAGE_1, **LLAMA)
    (problem,) = fit.shortages(estimated, 24 * GIB, 500 * GIB)
    assert f"the run needs {estimated.needed / GIB:.2f} GiB" in problem
    assert "of GPU memory, but 24.00 GiB are free" in problem
    assert "plan.force=true" in problem
    first = problem.partition("any one of these makes it fit: ")[2].partition(" (")[0]
    section, _, rest = first.partition(".")
    key, _, value = rest.partition("=")
    changed = {section: {key: int(value) if value.isdigit() else value}}
    together = {**LLAMA, section: {**LLAMA.get(section, {}), **changed[section]}}
    assert fit.shortages(estimate(STAGE_1, **together), 24 * GIB, None) == []
    (hopeless,) = fit.shortages(estimated, 1 * GIB, None)
    assert "these save most: " in hopeless


def test_host_memory_counts_all_ranks_of_the_node() -> None:
    estimated = estimate(OFFLOADED, **LLAMA)
    each = estimated.worst.most("host")
    assert fit.shortages(estimated, None, 2 * each) == []
    (problem,) = fit.shortages(estimated, None, 2 * each - 1)
    assert "of host memory" in problem


def test_a_process_on_a_gpu_holds_cudas_memory_of_the_host_too() -> None:
    for accelerator, size in (("cuda", PROCESS_HOST + CUDA_HOST), ("cpu", PROCESS_HOST)):
        worst = estimate(STAGE_1, accelerator, **LLAMA).worst
        assert worst.phase("build", "host")["process"] == size


def kinds(made: Plan) -> list[str]:
    return [event["kind"] for event in made.events]


def test_pinned_blocks_follow_the_user_allocator_settings() -> None:
    exact = plan(OFFLOADED, **LLAMA)  # DeepSpeed pins memory unless told otherwise
    rounded = plan(OFFLOADED, allocators="PYTORCH_ALLOC_CONF=max_split_size_mb:512", **LLAMA)
    notes = [event["message"] for event in rounded.events if event["kind"] == "pinned_memory"]
    assert ["add pinned_max_cached_size_mb:64" in note for note in notes] == [True]
    assert "pinned_memory" not in kinds(exact)
    sizes = exact.estimate.worst.phase("step", "host")
    names = ("master", "fp32 gradients", "parameter staging", "gradient staging", "gradient sums")
    more = sum(2 ** math.ceil(math.log2(sizes[name])) - sizes[name] for name in names)
    assert more > 0.3 * sum(sizes[name] for name in names)
    assert rounded.estimate.worst.phase("step", "host") == {**sizes, "pinned rounding": more}
    offload = {"device": "cpu", "pin_memory": False}
    ds = {**OFFLOADED, "zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    pageable = plan(ds, allocators="PYTORCH_ALLOC_CONF=max_split_size_mb:512", **LLAMA).estimate
    assert kinds(plan(STAGE_1, allocators="PYTORCH_ALLOC_CONF=x:1", **LLAMA)) == ["chosen"]
    assert pageable.host_bytes_per_node == exact.estimate.host_bytes_per_node


def test_older_torch_rounds_pinned_blocks_up() -> None:
    by_user = plan(OFFLOADED, allocators="PYTORCH_ALLOC_CONF=max_split_size_mb:512", **LLAMA)
    old = plan(OFFLOADED, torch="2.11.0", **LLAMA)
    assert old.estimate.host_bytes_per_node == by_user.estimate.host_bytes_per_node
    notes = [event["message"] for event in old.events if event["kind"] == "pinned_memory"]
    assert ["torch 2.11.0 cannot turn this off, torch 2.13 can" in n for n in notes] == [True]
    assert kinds(plan(STAGE_1, torch="2.11.0", **LLAMA)) == ["chosen"]


def test_offloaded_activations_stay_in_pinned_layer_blocks() -> None:
    kept = {"checkpointing": "full", "activation_offload": True, "name": "llama-1b"}
    run = {"model": kept, "data": {"seq_len": 1536}, "train": {"micro_batch": 1}}
    exact, rounded = plan(STAGE_1, **run), plan(STAGE_1, torch="2.12.0", **run)
    layer = 1536 * 2048 * 2  # bytes of its input: 6 MiB
    for phase in ("forward", "step", "between_steps"):
        sizes = exact.estimate.worst.phase(phase, "host")
        assert sizes["activations: layer inputs"] == 16 * layer
        more = rounded.estimate.worst.phase(phase, "host")["pinned rounding"]
        assert more == 16 * (8 * 2**20 - layer)
    assert kinds(rounded).count("pinned_memory") == 1


def test_every_way_to_save_memory_changes_the_job() -> None:
    run = run_of("llama-1b", accelerator="cuda", checkpointing="full", micro_batch=4, stage=3)
    assert run not in dict(fit._candidates(run)).values()


def test_cpu_ranks_have_all_their_memory_on_the_host() -> None:
    estimated = estimate({}, "cpu")
    needed = 2 * estimated.worst.on_cpu
    assert needed > 2 * estimated.worst.most("host")
    assert fit.shortages(estimated, None, needed) == []
    assert len(fit.shortages(estimated, None, needed - 1)) == 1


def test_cpu_memory_line_includes_the_process() -> None:
    tiny = estimate({"zero_optimization": {"stage": 1}}, "cpu")
    line, worst = fit.memory_line(tiny), tiny.worst
    assert line.startswith(f"{as_size(2 * worst.on_cpu)} of host memory per node; a rank holds ")
    assert f"{as_size(worst.on_cpu)} at most, in {worst.cpu_peak_phase} (process " in line
    assert sum(worst.cpu_phase(worst.cpu_peak_phase).values()) == worst.on_cpu
    # Nothing in it is larger than the whole, as the empty bucket was.
    assert tiny.worst.peak > worst.on_cpu
    assert f"{tiny.worst.peak / GIB:.2f} GiB" not in line


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a /proc and a control group tree to write into."""
    monkeypatch.setattr(fit, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(fit, "_CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup/slurm/job").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job\n")
    return tmp_path


def limit(folder: Path, most: str, anonymous: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.stat").write_text(f"anon {anonymous}\nfile 77\n")


def test_free_memory_respects_outer_cgroups(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(machine / "cgroup", "9000000", 0)
    assert fit.free_on_host() == 8000 * 1024
    limit(machine / "cgroup/slurm/job", "max", 0)
    assert fit.free_on_host() == 8000 * 1024
    limit(machine / "cgroup/slurm", "5000", 1000)
    assert fit.free_on_host() == 4000
    monkeypatch.setattr(fit, "_PROC", machine / "none")
    assert fit.free_on_host() is None


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    world = World(0, 4, 0, 4, accelerator="cuda", gpu="h100-80", ranks_per_gpu=4)
    shared = make_plan(RunConfig(), {}, world).estimate
    assert shared.device_bytes == pytest.approx((estimate({}).device_bytes or 0) / 4)


@pytest.mark.parametrize(
    ("visible", "local_rank", "sharing", "asked"),
    [
        *((None, 1, 1, "1"), ("4,5", 1, 1, "5"), ("GPU-aa", 1, 1, "GPU-aa"), ("", 0, 1, "0")),
        *((None, 3, 2, "1"), ("4,5", 3, 2, "5"), ("4", 3, 4, "4")),
    ],
)
def test_the_driver_is_asked_for_the_gpu_of_the_rank(
    visible: str | None,
    local_rank: int,
    sharing: int,
    asked: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver tool that records its arguments stands in: there is no GPU to query."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(fit, "visible_gpus", lambda environ: ["0", "1"])
    world = World(local_rank=local_rank, local_world_size=4, ranks_per_gpu=sharing)
    assert fit.free_on_gpu(world, {}) is None  # without the tool
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho 1234\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert fit.free_on_gpu(world, environ) == 1234 * 2**20 // sharing
    assert (tmp_path / "asked").read_text().split()[-1] == asked


def test_cpu_ranks_get_no_advice_to_offload() -> None:
    estimated = estimate({"zero_optimization": {"stage": 1}}, "cpu", **LLAMA)
    (problem,) = fit.shortages(estimated, None, 2 * GIB)
    assert "model.checkpointing=full" in problem
    assert "offload" not in problem
    assert "GPUs" not in problem


def test_fix_for_cpu_ranks_fits_with_their_processes() -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    run = {"model": {"overrides": {**small, "num_key_value_heads": 2}}}
    zero = {"stage": 1, "reduce_bucket_size": 1_000_000}
    estimated = estimate({"zero_optimization": zero}, "cpu", **run)
    tensors, whole = estimated.worst.peak, estimated.worst.on_cpu
    room = whole - PROCESS_HOST // 2
    assert fit.helpful_changes(estimated)
    for change in fit.helpful_changes(replace(estimated, device_bytes=room)):
        after = change.estimate.worst.on_cpu
        assert (change.saved_bytes, change.estimate.verdict) == (whole - after, "does not fit")
    (problem,) = fit.shortages(estimated, None, 2 * room)
    assert "makes it fit" not in problem
    assert tensors < room  # which once counted alone


SIZES = {"vocab_size": 512, "hidden_size": 64, "recurrent_size": 96, "num_hidden_layers": 2}


@pytest.fixture
def lstm(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "recurrent", **SIZES}))
    return f"model.name={tmp_path}"


def estimated(*words: str) -> Estimate:
    batch = ["train.global_batch=24", "train.micro_batch=3", "plan.force=true"]
    run = load_run_config(None, [*batch, *words])
    return make_plan(run, {"zero_optimization": {"stage": 1}}, World(0, 2, 0, 2)).estimate


@pytest.mark.gate("memory")
def test_a_rank_holds_the_states_of_all_of_its_rows(lstm: str) -> None:
    carried, plain = estimated(lstm, "train.carry_state=true").worst, estimated(lstm).worst
    row = 4 * 2 * 2 * 96  # bytes, layers, output and cell
    for phase in ("built", "between_steps", "backward_last"):
        assert carried.total(phase) - plain.total(phase) == 12 * row
    assert carried.total("forward") - plain.total("forward") == (12 + 2 * 3) * row
    assert carried.total("build") == plain.total("build")
