"""Each defect that quirks.py works around is still there; a failure here means it can go."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.two_ranks import REPOSITORY, SHARED_MEMORY, environment, run_ranks, start, wait

LEAVES_FILES = """
import deepspeed, torch
deepspeed.init_distributed(verbose=False)
deepspeed.comm.all_reduce(torch.ones(4))
torch.distributed.destroy_process_group()
"""
LEAVES_NONE = """
from harness.engine.processes import join, leave
from harness.planning.world import World
join(World.from_environ())
import deepspeed, torch
deepspeed.comm.all_reduce(torch.ones(4))
leave()
"""
LEAVES_AT_ONCE = """
import os, sys, time
from harness.engine import processes, quirks
from deepspeed.comm.torch import TorchBackend
from harness.planning.world import World

def late(*args):  # after the rendezvous, before the buffers are looked for
    original(*args)
    time.sleep(3 * (os.environ["RANK"] == "0"))

original, TorchBackend.init_process_group = TorchBackend.init_process_group, late
if sys.argv[1] == "deepspeed":
    quirks.meet_in_shared_memory = lambda: None
processes.join(World.from_environ())
"""
RESUMES_ADAM = """
import copy, sys
import deepspeed.ops.adam, torch
from harness.engine.quirks import replay_adam_steps

def run(steps, weight, saved=None, replay=False):
    parameter = torch.nn.Parameter(weight.clone())
    adam = getattr(deepspeed.ops.adam, sys.argv[1])([parameter], lr=1e-2, betas=(0.9, 0.95))
    if saved:
        adam.load_state_dict(copy.deepcopy(saved))
    if replay:
        replay_adam_steps(adam)
    for step in steps:
        parameter.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        adam.step()
    return parameter.detach(), copy.deepcopy(adam.state_dict())

start = torch.randn(1000, generator=torch.Generator().manual_seed(99))
half, saved = run(range(9), start)
whole, _ = run(range(200), start)  # second: FusedAdam's C++ is one per process
for name, replay in (("plain", False), ("replayed", True)):
    again, _ = run(range(9, 200), half, saved, replay)
    print(f"{name}={torch.equal(whole, again)}")
"""


def test_deepspeed_says_its_adam_can_be_built_without_looking_for_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder

    from harness.engine.quirks import compiled_adam_available

    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert FusedAdamBuilder().is_compatible()
    assert CPUAdamBuilder().is_compatible()
    assert compiled_adam_available("cpu") == "c++ not found"


@pytest.mark.slow
def test_deepspeed_leaves_files_in_shared_memory_and_we_remove_them(tmp_path: Path) -> None:
    left = {}
    for name, script in (("deepspeed", LEAVES_FILES), ("ours", LEAVES_NONE)):
        ended = run_ranks(
            [sys.executable, "-c", script], tmp_path / name, env={"PYTHONPATH": str(REPOSITORY)}
        )
        ended.succeeded()
        files = list(SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{ended.port}_*"))
        for file in files:
            file.unlink()
        left[name] = len(files)
    assert left == {"deepspeed": 2, "ours": 0}


@pytest.mark.slow
def test_a_rank_that_leaves_at_once_blocks_deepspeeds_others_for_ever_and_not_ours(
    tmp_path: Path,
) -> None:
    ended = {}
    for who, timeout_s in (("ours", 600), ("deepspeed", 15)):
        command = [sys.executable, "-c", LEAVES_AT_ONCE, who]
        group = start(command, tmp_path / who, env={"PYTHONPATH": str(REPOSITORY)})
        ended[who] = wait(group, timeout_s)
        for name in ended[who].left_in_shared_memory:
            (SHARED_MEMORY / name).unlink()
    assert ended["ours"].codes == [0, 0], ended["ours"].output
    assert ended["deepspeed"].codes == [-signal.SIGABRT, 0], ended["deepspeed"].output


@pytest.mark.slow
def test_deepspeed_keeps_no_norm_of_stage_0_in_fp32(result: Callable[[str], list[Any]]) -> None:
    assert [rank["deepspeeds"] for rank in result("grad_norm_of_stage_0")] == [None, None]


@pytest.mark.slow
def test_deepspeed_raises_a_bare_exception_at_the_minimum_loss_scale(
    result: Callable[[str], list[Any]],
) -> None:
    for rank in result("minimum_loss_scale"):
        name, message = rank["deepspeeds"]
        assert name == "Exception"
        assert "loss scale already at minimum" in message


@pytest.mark.slow
def test_deepspeed_refuses_fp16_on_this_cpu(result: Callable[[str], list[Any]]) -> None:
    for rank in result("fp16_refused"):
        if rank["supported"]:
            pytest.skip("this CPU has fp16 instructions")
        assert "fp16 is not supported" in rank["error"]


@pytest.mark.slow
def test_deepspeeds_bf16_optimizer_prints_memory_reports(
    result: Callable[[str], list[Any]],
) -> None:
    rank = result("bf16_optimizer_prints")[0]
    assert "begin bf16_optimizer" in rank["deepspeeds"]
    assert rank["ours"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam"])
def test_deepspeeds_resumed_adam_rounds_differently_and_ours_does_not(name: str) -> None:
    """Both as the CPU ranks use them, in a process that looks for no other device."""
    command = [sys.executable, "-c", RESUMES_ADAM, name]
    env = environment(PYTHONPATH=str(REPOSITORY))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["plain=False", "replayed=True"]
