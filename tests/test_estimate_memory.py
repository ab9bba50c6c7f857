import argparse
import json
import os
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from harness.errors import ExitCode
from harness.estimate.fit import Ways
from harness.estimate.memory_item import GIB, PHASES
from harness.estimate.timeline import estimate_memory
from harness.report.palette import COMPONENTS
from tests.estimate.runs import run_of
from tests.run_tools import run_tool
from tests.tables import beside
from tools.memory.plot import estimate_drawn
from tools.memory.sweep import Point
from tools.memory.text import describe
from tools.plan_args import add_kernels, add_plan_arguments, plan_of

TABLES = beside(__file__, "estimate_memory.toml")

REPOSITORY = Path(__file__).resolve().parents[1]
TOOL = REPOSITORY / "tools/estimate_memory.py"
STABLE_KEYS = {*TABLES["stable_keys"]}
LARGE = ("--model", "llama-3-8b", "--deepspeed", "ds_configs/zero3.json", "--gpus", "64")
run = partial(run_tool, "estimate_memory")


def estimated(*arguments: str, code: int = 0) -> dict:
    return json.loads(run(*arguments, "--json", code=code).stdout)


def test_kernels_are_named_as_pip_or_python_knows_them() -> None:
    parser = argparse.ArgumentParser()
    add_kernels(parser)
    words = ["--kernels", "mamba-ssm", "flash-linear-attention", "causal_conv1d"]
    assert parser.parse_args(words).kernels == ["mamba_ssm", "fla", "causal_conv1d"]


def test_json_has_stable_keys():
    estimate = estimated(*LARGE, "--gpus-per-node", "8", "--gpu", "h100-80", "--seq-len", "4096")
    assert estimate.keys() >= STABLE_KEYS
    assert list(estimate["phases"]) == list(PHASES)
    assert estimate["peak_phase"] == "loss"
    # When the layers' backward pass begins: without the head's activations and logits.
    parts = estimate["phases"]["backward_first"].items()
    saved = sum(size for name, size in parts if name.startswith("activations"))
    assert saved == pytest.approx(17.019, abs=0.01)  # with Liger's kernels
    peak = sum(estimate["phases"][estimate["peak_phase"]].values())
    assert estimate["peak_allocated_gib"] == pytest.approx(peak, abs=0.01)
    assert estimate["verdict"] == "fits"
    assert estimate["evidence"]["weakest"] == "guessed"


@pytest.mark.gate("memory")
@pytest.mark.parametrize("json_name", ["zero1", "zero2_offload", "fp16"])
def test_the_estimate_is_the_same_on_any_machine(json_name):
    words = ("--deepspeed", f"ds_configs/{json_name}.json", *LARGE[4:], "--gpu", "h100-80")
    command = [sys.executable, TOOL, *words, "--json"]
    environs = ({**os.environ, **machine} for machine in TABLES["machines"])
    outputs = {subprocess.check_output(command, cwd=REPOSITORY, env=env) for env in environs}
    assert len(outputs) == 1


def test_a_run_that_does_not_fit_is_told_what_would():
    too_small = ("--gpu", "a100-40", "--seq-len", "8192", "--micro-batch", "2")
    text = run(*LARGE, *too_small, code=ExitCode.DOES_NOT_FIT).stdout
    for words in ("Verdict: does not fit", "model.checkpointing=full", "stage 1", "rejected"):
        assert words in text
    assert "was assumed" not in text
    assert "One sample at a time was assumed (--micro-batch)" in run(*LARGE).stdout


@pytest.mark.parametrize(("key", "value", "title", "parts"), TABLES["divided"])
def test_tensors_and_sequences_are_divided(key, value, title, parts):
    whole = estimated(*LARGE, "model.kernels=none")
    assert whole["not_trained"] == []
    text = run(*LARGE, f"ds.{key}={value}").stdout
    assert f"{title}, ZeRO 3" in text
    divided = estimated(*LARGE, f"ds.{key}={value}")
    assert divided["not_trained"] == []
    (why,) = estimated(*LARGE, "ds.tensor_parallel.preset_model=llama")["not_trained"]
    assert why.startswith("tensor_parallel.preset_model is 'llama'")
    part, all_of_it = (estimate["phases"]["loss"] for estimate in (divided, whole))
    for name, times in zip(("activations: mlp", "logits and loss"), parts, strict=True):
        assert times * part[name] == pytest.approx(all_of_it[name], abs=1e-3)
    assert divided["checkpoint_gib"] == whole["checkpoint_gib"]


@pytest.mark.gate("memory")
def test_a_trace_is_compared_with_the_undivided_run():
    keys = ("--model", "llama-1b", "--gpus", "4", "--trace", "ds.tensor_parallel.autotp_size=2")
    estimate = estimated(*keys)
    assert estimate["counted_saved_gib"] == pytest.approx(estimate["traced_saved_gib"], rel=0.001)


@pytest.mark.parametrize(("words", "batch"), TABLES["batches"])
def test_the_parts_of_a_batch_that_are_not_set_are_assumed(words, batch):
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    plan = plan_of(parser.parse_args(["--gpus=8", *words]), estimating=True)
    assert [plan.micro_batch, plan.grad_accum] == batch
    whole = plan.estimate.to_json()
    text = describe(plan.estimate, None, Ways())
    assert "0.00  #" not in text  # parts that are too small get no bar
    assert whole | Point({}, plan.estimate).to_json() == whole


def test_flags_are_other_names_for_keys():
    by_flag = estimated("--model", "llama-1b", "--micro-batch", "2", "--checkpointing", "full")
    by_key = estimated("model.name=llama-1b", "train.micro_batch=2", "model.checkpointing=full")
    assert by_flag == by_key


def test_sweep_and_plot(tmp_path):
    picture = tmp_path / "memory.svg"
    text = run("--sweep", "micro_batch=1..4", "seq_len=128..256", "--plot", str(picture)).stdout
    assert sum("micro_batch" in line and "seq_len" in line for line in text.splitlines()) == 6
    drawn = picture.read_text()
    assert "tokens in a sample" in drawn
    assert all(f">{label}</text>" in drawn for label in (1, 2, 4, 128, 256))
    assert "backward begins" not in drawn  # only the requested sweep
    assert "micro-batch 1 x" not in drawn  # which differs by point
    run("--plot", str(picture.with_suffix(".png")))
    assert picture.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_line_of_the_gpu_is_at_its_memory():
    figure = estimate_drawn(estimate_memory(run_of("llama-1b"), 80 * GIB), "", "")
    assert [line.get_ydata()[0] for axis in figure.axes for line in axis.lines] == [80, 80]


def test_the_picture_has_six_colours_and_says_whose_it_is(tmp_path):
    picture = tmp_path / "memory.svg"
    words = ("--model", "llama-3-8b", "--gpus", "64", "--gpu", "h100-80", "--seq-len", "4096")
    text = run(*words, "--plot", str(picture)).stdout
    drawn = picture.read_text()
    for name, colour in COMPONENTS.items():
        assert f">{name}</text>" in drawn
        assert colour.light in drawn
    for words in TABLES["drawn"]:
        assert words in drawn
    peak = float(re.search(r"Peak on rank 0: ([\d.]+) GiB", text)[1])
    assert f">{peak:,.1f}</text>" in drawn


@pytest.mark.gate("memory")
@pytest.mark.parametrize("gpu", [(), ("--gpu", "a100-80")])
def test_a_sweep_is_drawn_as_a_heat_map(tmp_path, gpu):
    picture = tmp_path / "sweep.svg"
    swept = ("--sweep", "gpus=8..16", "micro_batch=1..4", "seq_len=512..4096")
    words = ("--model", "llama-1b", *gpu, *swept, "--plot", str(picture), "--json")
    points = json.loads(run(*words).stdout)["sweep"]
    drawn = picture.read_text()
    assert len(points) == 2 * 3 * 4
    for point in points:
        assert f">{point['peak_allocated_gib']:,.1f}</text>" in drawn
    verdicts = {point["verdict"] for point in points} - {"unknown device"}
    assert all(f">{verdict}</text>" in drawn for verdict in verdicts)


def test_a_pipe_that_closes_ends_it_without_a_traceback():
    command = f"{sys.executable} {TOOL} --model llama-1b | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "parameters in bf16" in done.stdout
    assert done.stderr == ""


@pytest.mark.gate("memory")
def test_a_trace_of_8b_agrees_within_4_gib():
    """The loss takes the vocabulary in chunks: 26.601 GiB minus 4 bytes for each logit."""
    estimate = estimated(*LARGE[:2], "--seq-len", "4096", "--trace", "model.kernels=none")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert estimate["traced_saved_gib"] == pytest.approx(24.644, abs=0.002)
    assert estimate["counted_saved_gib"] == pytest.approx(estimate["traced_saved_gib"], rel=0.001)
    assert after.ru_maxrss < 4 * 2**20  # KiB


PIPELINED = ("--model", "gpt2-124m", "--gpus", "8", "ds.pipeline.stages=4")


def test_pipeline_stages_are_listed_with_their_fullest_rank():
    text = run(*PIPELINED, "--seq-len", "1024").stdout
    assert re.search(r"Peak on rank \d, pipeline stage \d: ", text)
    assert re.search(r"stage 1 +4 layers +28,351,488 parameters +3 in flight ", text)
    assert text.count("rejected under pipeline stages") == 2
    assert {rank["pipeline_stage"] for rank in estimated(*PIPELINED)["ranks"]} == {0, 1, 2, 3}


@pytest.mark.gate("memory")
def test_what_stages_would_save_is_what_they_save():
    eight = ("--model", "llama-3-8b", "--deepspeed", "ds_configs/zero1.json", "--gpus", "8")
    run_of_eight = (*eight, "train.global_batch=16", "--micro-batch", "1", "--seq-len", "4096")
    text = run(*run_of_eight, "--gpu", "h100-80").stdout
    for stages in (4, 8):
        promised = re.search(rf"ds.pipeline.stages={stages} .*-> +([0-9.]+) GiB", text)
        staged = json.loads(run(*run_of_eight, f"ds.pipeline.stages={stages}", "--json").stdout)
        assert float(promised[1]) == pytest.approx(staged["peak_allocated_gib"], abs=0.006)
    offloaded = run(*run_of_eight, "ds.zero_optimization.offload_optimizer.device=cpu").stdout
    assert "pipeline.stages" not in offloaded


def test_a_host_has_a_verdict_of_its_own():
    words = ("--model", "llama-1b", "--deepspeed", "ds_configs/zero2_offload.json", "--gpus", "8")
    needed = estimated(*words)["host_gib_per_node"]
    rooms = {needed + 1: 0, needed - 1: 3}
    verdicts = [estimated(*words, "--host-memory", gib, code=code) for gib, code in rooms.items()]
    assert [each["host_verdict"] for each in verdicts] == ["fits", "does not fit"]
    text = run(*words, "--host-memory", 8, code=3).stdout
    assert f"Host memory per node: does not fit: {needed:,.2f} of 8.00 GiB" in text
