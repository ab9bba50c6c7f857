"""Each defect that is worked around is still there; a failure here means that its patch can go."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from tests.run_tools import printed
from tests.two_ranks import REPOSITORY, environment, run_ranks

JOINS = """
import sys
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

def load(self):
    raise SystemExit("builds it")

ShareMemCommBuilder.load = load
if sys.argv[1] == "deepspeed":
    import deepspeed
    deepspeed.init_distributed(verbose=False)
else:
    from harness.engine.processes import join
    from harness.layout.world import World
    join(World.from_environ())
"""
LOADS_THE_COMPILER = """
import sys
import deepspeed
if sys.argv[1] == "harness":
    from harness.engine.deepspeed_0_19.process_wide import leave_muon_uncompiled
    leave_muon_uncompiled()
before = deepspeed.runtime.compiler.compile.__name__
import deepspeed.runtime.zero.muon.muon_optimizer
print(before, "torch._inductor.compile_fx" in sys.modules)
"""
COUNTS_RELEASES = """
import sys
import deepspeed, torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from harness.engine.deepspeed_0_19 import process_wide

released = []
partition = "_PartitionedParameterCoordinator__release_param"
release = getattr(PartitionedParameterCoordinator, partition)

def counted(self, param, free_data=True):
    released.append(param.ds_id)
    release(self, param, free_data)

def releases(evaluates):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    parameters = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    x = torch.ones(1, 8)
    if evaluates:
        with torch.no_grad():
            engine.eval()
            engine(x)
    engine.train()
    for _ in range(5):
        released.clear()
        engine.backward(engine(x).sum())
        engine.step()
    return len(released)

setattr(PartitionedParameterCoordinator, partition, counted)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compiling it takes a minute
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
plain, deepspeeds = releases(evaluates=False), releases(evaluates=True)
process_wide.forget_releases_with_the_trace()
print(plain, deepspeeds, releases(evaluates=True))
"""
RESUMES_ADAM = """
import copy
import deepspeed.ops.adam, torch
from harness.engine.deepspeed_0_19.settlements import replay_adam_steps

def run(steps, weight, saved=None, replay=False):
    parameter = torch.nn.Parameter(weight.clone())
    adam = deepspeed.ops.adam.DeepSpeedCPUAdam([parameter], lr=1e-2, betas=(0.9, 0.95))
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
whole, _ = run(range(200), start)
for name, replay in (("plain", False), ("replayed", True)):
    again, _ = run(range(9, 200), half, saved, replay)
    print(f"{name}={torch.equal(whole, again)}")
"""
SEEKS_TIED = """
import torch
from deepspeed.pipe import PipelineModule
from harness.engine.deepspeed_0_19.pipe_module import StageModule
from harness.layout.grid import Grid
from harness.engine.processes import join
from harness.layout.world import World
join(World())
stage = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False))
stage[1].weight = stage[0].weight
theirs = PipelineModule([stage], num_stages=1, partition_method="uniform")
ours = StageModule(stage, Grid(1), [(stage[0].weight, torch.distributed.group.WORLD)])
for name, module in (("deepspeeds", theirs), ("ours", ours)):
    print(f"{name}={len(module.get_tied_weights_and_groups())}")
"""


def test_deepspeed_says_its_adam_can_be_built_without_looking_for_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    from harness.plan.machine import missing_for_cpu_adam

    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert CPUAdamBuilder().is_compatible()
    assert missing_for_cpu_adam() == "c++ not found"


@pytest.mark.slow
def test_deepspeed_builds_its_shared_memory_operator_to_join_and_we_do_not(tmp_path: Path) -> None:
    builds = {}
    for who in ("deepspeed", "ours"):
        command = [sys.executable, "-c", JOINS, who]
        env = {"PYTHONPATH": str(REPOSITORY)}
        builds[who] = "builds it" in run_ranks(command, tmp_path / who, ranks=1, env=env).output
    assert builds == {"deepspeed": True, "ours": False}


@pytest.mark.slow
@pytest.mark.parametrize(("who", "loads"), [("deepspeed", True), ("harness", False)])
def test_deepspeeds_muon_loads_the_compiler_and_ours_does_not(who: str, loads: bool) -> None:
    output = printed(LOADS_THE_COMPILER, who)
    assert output.splitlines()[-1] == f"compile {loads}"


@pytest.mark.slow
def test_zero_3_gathers_twice_after_an_early_evaluation_and_ours_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNTS_RELEASES]
    env = {"PYTHONPATH": str(REPOSITORY)}
    ended = run_ranks(command, tmp_path, ranks=1, env=env).succeeded()
    assert ended.output.splitlines()[-1] == "16 24 16"


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
def test_deepspeeds_resumed_cpu_adam_rounds_differently_and_ours_does_not() -> None:
    """As the CPU ranks use it, in a process that looks for no other device."""
    command = [sys.executable, "-c", RESUMES_ADAM]
    env = environment(PYTHONPATH=str(REPOSITORY))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["plain=False", "replayed=True"]


@pytest.mark.slow
def test_deepspeed_clips_stage_0_by_the_norm_of_the_first_pipeline_stage(
    result: Callable[[str], list[Any]],
) -> None:
    for rank in result("pipeline_clips_stage_0"):
        assert rank["deepspeeds"] > 1.1 * rank["limit"]


@pytest.mark.slow
def test_zero_1_sums_the_norm_over_stages_group_by_group_and_ours_once(
    result: Callable[[str], list[Any]],
) -> None:
    assert [rank["deepspeeds"] for rank in result("pipeline_sums_norms_by_group")] == [2, 3]
    assert [rank["ours"] for rank in result("pipeline_sums_norms_by_group")] == [1, 1]


@pytest.mark.slow
def test_deepspeed_keeps_the_grid_and_the_groups_of_a_destroyed_engine(
    result: Callable[[str], list[Any]],
) -> None:
    for rank in result("pipeline_leaves_its_grid"):
        grid, groups = rank["deepspeeds"]
        assert grid
        assert groups > 2
        assert rank["ours"] == [False, 0]


@pytest.mark.slow
def test_deepspeed_keeps_the_group_of_the_second_copy_of_a_destroyed_engine(
    result: Callable[[str], list[Any]],
) -> None:
    for rank in result("second_copy_leaves_its_group"):
        assert rank == {"deepspeeds": True, "ours": False}


@pytest.mark.slow
def test_deepspeed_packs_flat_gradients_to_reduce_them_and_we_do_not(
    result: Callable[[str], list[Any]],
) -> None:
    for rank in result("packed_to_be_reduced"):
        assert rank == {"deepspeeds": [2], "ours": [1, 1]}


@pytest.mark.slow
def test_deepspeed_looks_for_experts_only_beside_a_module_of_its_own_class(
    result: Callable[[str], list[Any]],
) -> None:
    errors = result("deepspeed_without_the_marker")
    assert errors == ["'NoneType' object is not subscriptable"] * 2


@pytest.mark.slow
def test_deepspeeds_pipeline_prints_whatever_the_log_level(
    result: Callable[[str], list[Any]],
) -> None:
    rank = result("pipeline_prints")[0]
    assert "SEED_LAYERS" in rank["deepspeeds"]
    assert rank["ours"] == ""


@pytest.mark.slow
def test_zero_0_in_fp32_steps_with_nan(result: Callable[[str], list[Any]]) -> None:
    assert result("zero_0_steps_with_nan") == [{"applied": True, "finite": False}] * 2


@pytest.mark.slow
def test_the_offloading_optimizer_keeps_the_gradients_of_a_skipped_step(
    result: Callable[[str], list[Any]],
) -> None:
    kept = result("offloading_keeps_the_gradients_of_a_skipped_step")
    assert kept == [{"deepspeeds": False, "ours": True}] * 2


def test_a_new_group_of_torch_has_its_own_timeout() -> None:
    default = distributed_c10d._get_default_timeout
    assert default("gloo") == distributed_c10d.default_pg_timeout
    source = inspect.getsource(distributed_c10d._new_group_with_tag)
    assert "timeout = _get_default_timeout(backend)" in source


def test_deepspeeds_pipeline_finds_no_tied_weights_in_a_stage() -> None:
    output = printed(SEEKS_TIED)
    assert output.split()[-2:] == ["deepspeeds=0", "ours=1"]


def test_every_patch_names_what_is_there_and_a_test_that_is_here() -> None:
    code = (
        "from harness.engine.deepspeed_0_19.patches import PATCHES; print(repr(["
        "(p.names, p.why, p.when, p.test) for p in PATCHES]))"
    )
    output = printed(code)
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    findings = (REPOSITORY / "docs" / "deepspeed_findings.md").read_text("utf-8")
    rows = ast.literal_eval(output.splitlines()[-1])
    assert len(rows) > 10
    for names, why, when, test in rows:
        assert f"def {test}(" in tests, names
        assert isinstance(why, str) or f"\n## {why}. " in findings, names
        if when == "join" and "()" not in names:
            owner, _, last = names.split()[0].rpartition(".")
            assert resolved(owner, last), names


def resolved(owner: str, name: str) -> bool:
    """Return True if an attribute is there, of a module or of a class in one."""
    try:
        place: object = importlib.import_module(owner)
    except ModuleNotFoundError:
        module, _, attribute = owner.rpartition(".")
        place = getattr(importlib.import_module(module), attribute)
    return hasattr(place, name)
