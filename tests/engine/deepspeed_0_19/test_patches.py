"""Each DeepSpeed defect with a workaround still exists; if not, the workaround can go."""

import contextlib
import inspect
import io
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.utils import groups
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.engine.deepspeed_0_19 import between_steps, experts, gradients, patches, pipe_module
from harness.engine.deepspeed_0_19.patches import PATCHES
from harness.errors import ConfigError, RunStopped
from harness.plan.machine import missing_for_cpu_adam
from tests.engine.engines import (
    SGD,
    WORLD,
    different,
    engine_of,
    fp16,
    gathered,
    losses,
    share_of,
    written,
)
from tests.engine.small import MIXTURES, MODEL
from tests.engine.test_bad_steps import gradient_of
from tests.gates.engines import forget_nodes, process_groups
from tests.ranks import ranks
from tests.real_runs import REPOSITORY, run_ranks
from tests.run_tools import printed
from tests.tables import beside

SCRIPTS = beside(__file__, "scripts.toml")

BF16 = "zero1 bf16 fp32_sums"  # BF16_Optimizer
STAGES = "zero1 pipeline2"


def test_deepspeed_calls_adam_compatible_without_a_compiler(monkeypatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert CPUAdamBuilder().is_compatible()
    assert missing_for_cpu_adam() == "c++ not found"


@pytest.mark.gate("engine")  # a fresh process imports everything
def test_deepspeed_builds_shared_memory_op_on_join_ours_does_not(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(REPOSITORY)}
    for who, builds in (("deepspeed", True), ("ours", False)):
        command = [sys.executable, "-c", SCRIPTS["joins"], who]
        ended = run_ranks(command, tmp_path / who, ranks=1, env=env)
        assert ("builds it" in ended.output) == builds


@pytest.mark.gate("engine")  # a fresh process imports everything
@pytest.mark.parametrize(("who", "loads"), [("deepspeed", True), ("harness", False)])
def test_deepspeeds_muon_loads_the_compiler_and_ours_does_not(who: str, loads: bool) -> None:
    assert printed(SCRIPTS["loads_the_compiler"], who).splitlines()[-1] == f"compile {loads}"


@pytest.mark.gate("engine")  # a fresh process imports everything
def test_zero_3_gathers_twice_after_early_evaluation_ours_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPTS["counts_releases"]]
    env = {"PYTHONPATH": str(REPOSITORY)}
    ended = run_ranks(command, tmp_path, ranks=1, env=env).succeeded()
    assert ended.output.splitlines()[-1] == "16 24 16"


@ranks(2)
def test_deepspeed_keeps_no_norm_of_stage_0_in_fp32() -> None:
    """Our norm is reported."""
    engine = engine_of("zero0")
    engine.accumulate(*share_of(engine))
    norm = torch.stack([gradient.norm() for _, gradient in engine.gradients()]).norm()
    assert float(engine.apply(1e-3)) == pytest.approx(float(norm), rel=1e-5)
    assert engine.engine.get_global_grad_norm() is None


@ranks(2)
def test_deepspeed_raises_bare_exception_at_minimum_loss_scale() -> None:
    """Our engine ends the run with a diagnosis."""
    engine = engine_of(fp16(min_loss_scale=2**32))
    engine.accumulate(*share_of(engine))
    with pytest.raises(Exception, match="loss scale already at minimum") as caught:
        engine.engine.step()
    assert type(caught.value) is Exception
    engine.close()
    engine = engine_of(fp16(min_loss_scale=2**32))
    with pytest.raises(RunStopped, match=r"lower optim\.lr") as stopped:
        engine.train_batch(*share_of(engine), 1e-3)
    assert stopped.value.code == 76


@ranks(2)
def test_deepspeed_refuses_fp16_on_this_cpu() -> None:
    accelerator = get_accelerator()
    ours = accelerator.__dict__.pop("is_fp16_supported")
    try:
        if accelerator.is_fp16_supported():
            return  # a CPU with fp16 instructions
        with pytest.raises(ValueError, match="fp16 is not supported"):
            engine_of(fp16(initial_scale_power=8))
    finally:
        accelerator.is_fp16_supported = ours


def printed_by_an_engine(layout: str) -> str:
    """Return what this rank prints while it builds an engine."""
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        engine_of(layout).close()
    return lines.getvalue()


def check_reports(layout: str, room: Any, name: str, deepspeeds: Any, report: str) -> None:
    """Assert that building an engine prints a report on rank 0, only with DeepSpeed's function."""
    assert printed_by_an_engine(layout) == ""
    with mock.patch.object(room, name, deepspeeds):
        assert (report in printed_by_an_engine(layout)) == (WORLD.rank == 0)


@ranks(2)
def test_deepspeeds_bf16_optimizer_prints_memory_reports() -> None:
    own = "begin bf16_optimizer"
    check_reports(BF16, bf16_optimizer, "see_memory_usage", see_memory_usage, own)


@ranks(2)
def test_deepspeeds_pipeline_prints_whatever_the_log_level() -> None:
    check_reports(STAGES, pipe_module, "printing_nothing", nullcontext, "SEED_LAYERS")


@pytest.mark.gate("engine")  # a fresh process imports everything
def test_deepspeed_resumed_cpu_adam_rounds_differently() -> None:
    """As on CPU ranks, in a process that looks for no other device."""
    assert printed(SCRIPTS["resumes_adam"]).split()[-2:] == ["plain=False", "replayed=True"]


@ranks(2)
def test_deepspeed_clips_stage_0_by_norm_of_first_pipeline_stage() -> None:
    """One SGD step with rate 1 moves the weights by the limit only with our patch."""
    limit, moved = 0.05, {}
    patched = mock.patch.object(gradients, "count_every_stage")
    for who, patch in (("ours", nullcontext()), ("deepspeeds", patched)):
        with patch:
            engine = engine_of("zero0 pipeline2", optim={**SGD, "clip_norm": limit})
        before = dict(engine.masters())
        assert engine.train_batch(*share_of(engine), 1.0).grad_norm > 10 * limit
        steps = [before[name] - after for name, after in engine.masters()]
        moved[who] = float(torch.stack([step.norm() for step in steps]).norm())
        engine.close()
    assert moved["ours"] == pytest.approx(limit, rel=1e-4)
    assert moved["deepspeeds"] > 1.1 * limit


@ranks(2)
def test_zero_1_sums_norm_per_group_over_stages_and_ours_once() -> None:
    """A stage still waits for the other one as often."""
    engine = engine_of(STAGES, optim={"groups": [{"pattern": "lm_head", "lr_multiplier": 0.5}]})
    engine.accumulate(*share_of(engine))
    optimizer = engine.engine.optimizer
    reduce = mock.Mock()  # waits for nobody
    with mock.patch.object(type(optimizer), "_model_parallel_all_reduce", reduce):
        vars(optimizer).pop("scaled_global_norm", None)
        optimizer.scaled_global_norm()
        assert reduce.call_count == (2, 3)[WORLD.rank]
        gradients.add_norms_over_stages_once(engine.engine)
        reduce.reset_mock()
        optimizer.scaled_global_norm()
        assert reduce.call_count == 1


@ranks(2)
def test_deepspeed_keeps_grid_and_groups_of_destroyed_engine() -> None:
    before = process_groups()
    engine = engine_of(STAGES)
    engine.engine.destroy()
    assert groups.mpu is not None
    assert len(process_groups() - before) > 2
    engine.close()
    assert groups.mpu is None
    assert process_groups() <= before
    engine_of("zero3 hpz").engine.destroy()
    assert groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is not None
    forget_nodes()
    assert groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is None


@ranks(2)
def test_deepspeed_packs_flat_gradients_and_ours_does_not() -> None:
    engine, packed = engine_of(BF16), []
    flatten = engine.engine.flatten
    engine.engine.flatten = lambda tensors: packed.append(len(tensors)) or flatten(tensors)
    engine.train_batch(*share_of(engine), 1e-3)
    assert packed == [1, 1]
    packed.clear()
    vars(engine.engine).pop("allreduce_and_copy", None)
    engine.train_batch(*share_of(engine), 1e-3)
    assert packed == [2]


class Kernels(TorchDispatchMode):
    """Counts operations that compute something, and the bytes of what they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace == "aten":
            leaves = tree_leaves((args, kwargs, result))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.count += 1
            self.bytes += sum({id(t): t.nbytes for t in tensors}.values())
        return result


def of_deepspeed(engine: Any) -> contextlib.ExitStack:
    """Restore DeepSpeed's own code of a step, also in this process until the context ends."""
    stack = contextlib.ExitStack()
    for name in ("get_global_norm_of_tensors", "clip_tensors_by_global_norm"):
        own = getattr(deepspeed.runtime.utils, name)
        stack.enter_context(mock.patch.object(bf16_optimizer, name, own))
    optimizer, add = engine.engine.optimizer, "_add_to_grad_partition_buffer"
    theirs = staticmethod(lambda output, source: output.add_(source.to(output.dtype)))
    if hasattr(optimizer, add):
        stack.enter_context(mock.patch.object(type(optimizer), add, theirs))
    for patch in PATCHES:
        if patch.apply.__module__ == between_steps.__name__:
            for name in patch.names.removeprefix("engine.optimizer.").split():
                vars(optimizer).pop(name, None)
    if not hasattr(optimizer, "flatten"):
        optimizer.flatten = torch._utils._flatten_dense_tensors
    return stack


@pytest.mark.parametrize("layout", [BF16, "zero2 bf16 fp32_sums", "zero3 bf16 fp32_sums"])
@ranks(2)
def test_deepspeeds_step_takes_kernels_for_each_tensor_ours_few(layout: str) -> None:
    kernels, bytes_moved, weights = [], [], []
    for is_ours in (True, False):
        engine = engine_of(f"{layout} fused", optim={"clip_norm": 1e3})
        with nullcontext() if is_ours else of_deepspeed(engine):
            engine.train_batch(*share_of(engine), 1e-3)  # the sums exist
            with Kernels() as seen:
                engine.accumulate(*share_of(engine))
            with Kernels() as of_step:
                engine.apply(1e-3)
        kernels.append(of_step.count)
        bytes_moved.append(seen.bytes + of_step.bytes)
        weights.append({name: weight.clone() for name, weight in engine.masters()})
        engine.close()
    assert kernels[0] < 0.8 * kernels[1], kernels
    assert bytes_moved[0] < bytes_moved[1]
    assert different(weights[0].items(), weights[1]) == []


@ranks(2)
def test_deepspeed_finds_experts_only_beside_its_own_moe_class() -> None:
    model = {"name": written("mixtral", MIXTURES["mixtral"])}
    with mock.patch.object(experts, "Marker", nn.Identity):
        engine = engine_of("zero1 experts2", model=model)
        with pytest.raises(TypeError, match="'NoneType' object is not subscriptable"):
            engine.accumulate(*share_of(engine))


@ranks(2)
def test_zero_0_in_fp32_steps_with_nan() -> None:
    """DeepSpeed without our code, which skips it."""
    engine = engine_of("zero0")
    with gradient_of(engine, math.nan):
        engine.train_batch(*share_of(engine), 1e-3)
    assert not engine.step_applied
    with gradient_of(engine, math.nan):
        engine.accumulate(*share_of(engine))
    engine.engine.step()
    assert engine.step_applied
    assert not all(bool(weight.isfinite().all()) for _, weight in engine.masters())


@pytest.mark.gate("engine")
@pytest.mark.parametrize("bf16", [False, True])
@ranks(8)
def test_deepspeed_tied_ends_drift_over_four_data_ranks(bf16: bool) -> None:
    """Two summands have one sum; four have several, by their order."""
    layout = f"{STAGES} bf16" if bf16 else STAGES
    tied = written("tied", {**MODEL, "tie_word_embeddings": True, "vocab_size": 5000})
    equal = []
    for is_ours in (False, True):
        engine = engine_of(layout, model={"name": tied})
        if not is_ours:
            del engine.engine._INSTRUCTION_MAP  # that of DeepSpeed's class remains
        losses(engine, 3)
        for _, weight, ends in engine.tied():
            copies = [torch.empty_like(weight) for _ in range(2)]
            dist.all_gather(copies, weight.detach().contiguous(), group=ends)
            equal.append(torch.equal(*copies))
        engine.close()
    assert equal in ([], [False, True])  # ranks between the ends hold no tied weight
    assert any(gathered(equal))


@ranks(2)
def test_tied_gradients_are_averaged_before_the_ends_add_theirs() -> None:
    """Here, both ranks are the data ranks and the ends."""
    engine, weight = mock.MagicMock(using_bf16_optimizer=False, _INSTRUCTION_MAP={}), mock.Mock()
    engine.mpu.get_data_parallel_group.return_value = None
    engine.module.get_tied_weights_and_groups.return_value = [(weight, None)]
    weight.grad = torch.tensor(1.0 + WORLD.rank)
    gradients.average_tied_gradients_first(engine)
    (reduce,) = engine._INSTRUCTION_MAP.values()
    reduce(engine)
    assert weight.grad == 1.5 + 1.5


@pytest.mark.slow("DeepSpeed's CPU Adam may have to be compiled")
@ranks(2)
def test_offload_optimizer_keeps_gradients_of_a_skipped_step() -> None:
    """Without our workaround, the step after one with NaN is also skipped."""
    nothing = mock.patch.object(gradients, "drop_skipped_gradients")
    for workaround, applied in ((nothing, False), (nullcontext(), True)):
        with workaround:
            engine = engine_of("zero2 bf16 fp32_sums offload")
            with gradient_of(engine, math.nan):
                engine.train_batch(*share_of(engine), 1e-3)
            engine.train_batch(*share_of(engine), 1e-3)
        assert engine.step_applied is applied
        engine.close()


def test_a_new_group_of_torch_has_its_own_timeout() -> None:
    default = distributed_c10d._get_default_timeout
    assert default("gloo") == distributed_c10d.default_pg_timeout
    source = inspect.getsource(distributed_c10d._new_group_with_tag)
    assert "timeout = _get_default_timeout(backend)" in source


@pytest.mark.gate("engine")  # a fresh process imports everything
def test_deepspeeds_pipeline_finds_no_tied_weights_in_a_stage() -> None:
    assert printed(SCRIPTS["seeks_tied"]).split()[-2:] == ["deepspeeds=0", "ours=1"]


def test_every_patch_names_what_is_there_and_a_test_that_is_here() -> None:
    here = Path(__file__)
    files = here, here.with_name("test_builds.py"), REPOSITORY / "tests" / "test_accept_gpu.py"
    tests = "".join(path.read_text("utf-8") for path in files)
    findings = (REPOSITORY / "docs" / "deepspeed_findings.md").read_text("utf-8")
    assert len(PATCHES) > 10
    for patch in PATCHES:
        assert f"def {patch.test}(" in tests, patch.names
        assert isinstance(patch.why, str) or f"\n## {patch.why}. " in findings, patch.names
        if patch.when == "join" and "()" not in patch.names:
            assert patches.is_there(patch.names.split()[0]), patch.names
    names = [*patches.patched_names()]
    assert len(names) >= 8
    assert [name for name in names if not patches.is_there(name)] == []
    assert not patches.is_there("deepspeed.comm.torch.no_such_name")
    assert not patches.is_there("deepspeed.no_such_module.name")


def test_newer_deepspeed_runs_or_names_the_missing_private_name(monkeypatch) -> None:
    said: list[str] = []
    for installed in ("0.19.8", "0.19.99", "0.20.0"):
        assert said == []
        monkeypatch.setattr(patches, "version", lambda name, v=installed: v)
        patches.require_names(said.append)
    assert said[0].startswith("deepspeed 0.20.0 is newer than 0.19, the newest tested")
    monkeypatch.delattr(PipelineEngine, "_exec_schedule")
    with pytest.raises(ConfigError, match=r"0\.20\.0 has no \S+PipelineEngine\._exec_schedule, "):
        patches.require_names(said.append)


def test_a_weight_without_gradient_has_a_sum_of_zero() -> None:
    """Not that of the last step, in which it had one."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    sums = [torch.full((2,), 7.0) for _ in weights]
    optimizer: Any = SimpleNamespace(immediate_grad_update=False, update_hp_grads=None)
    optimizer.bf16_groups, optimizer.fp32_groups_gradients = [weights], [sums]
    optimizer.fp32_groups_has_gradients = [[False, False]]
    between_steps.sum_at_once(SimpleNamespace(optimizer=optimizer))
    weights[0].grad = torch.ones(2)
    optimizer.update_hp_grads()
    assert torch.stack(sums).tolist() == [[1, 1], [0, 0]]
