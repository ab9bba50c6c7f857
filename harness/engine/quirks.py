"""What DeepSpeed 0.19.8 (and torch under it) does that has to be worked around, in one place.

tests/engine/test_quirks.py shows for every entry that the defect is still there: when such a test
fails after an upgrade, its workaround can go.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups
from torch.distributed import distributed_c10d
from torch.nn import functional


def compiled_adam_available(accelerator: str) -> str | None:
    """None when DeepSpeed's compiled Adam can be built here, else what is missing.

    DeepSpeed's own `is_compatible` says yes without looking for a compiler; the build then fails
    inside `initialize`, after the model was built.
    """
    needed = ["c++", "ninja"] if accelerator == "cpu" else ["c++", "ninja", "nvcc"]
    found = {"c++": _compiler(), "ninja": _ninja(), "nvcc": _nvcc()}
    missing = [name for name in needed if not found[name]]
    return f"{', '.join(missing)} not found" if missing else None


def with_torch_adam(config: dict[str, Any]) -> dict[str, Any]:
    """The same JSON with torch's Adam in the place of DeepSpeed's compiled one."""
    optimizer = config["optimizer"]
    params = {**optimizer["params"], "torch_adam": True}
    return {**config, "optimizer": {**optimizer, "params": params}}


def keeps_no_grad_norm(engine: Any) -> bool:
    """True for ZeRO-0 in fp32, which clips inside `step` and records no norm at all.

    `get_global_grad_norm` is then None; the norm has to be taken between backward and step.
    """
    return engine.zero_optimization_stage() == 0 and not (
        engine.fp16_enabled() or engine.bfloat16_enabled()
    )


@contextlib.contextmanager
def discarding(engine: Any) -> Iterator[None]:
    """Let a step throw its gradients away, in DeepSpeed's own way out of an overflow.

    The engine counts it as skipped and is clean for the next; the loss scale stays. DeepSpeed has
    no call for that, and ZeRO-0 in fp32 has no way out at all: it steps with NaN as with anything.
    """
    optimizer = engine.optimizer
    with contextlib.ExitStack() as replaced:
        if keeps_no_grad_norm(engine):
            replaced.enter_context(_replaced(optimizer, "step", lambda *_, **__: None))
            replaced.enter_context(_replaced(optimizer, "overflow", True))
        else:
            room = sys.modules[type(optimizer).__module__]
            replaced.enter_context(_replaced(room, "is_invalid_grad_norm", lambda norm: True))
            replaced.enter_context(_replaced(optimizer, "_update_scale", lambda overflow: None))
        yield


def settle_gradients(engine: Any) -> None:
    """Let gradients be read as soon as the last backward pass was launched.

    ZeRO-1 and -2 copy offloaded gradients to the host, and wait for that at the head of `step`
    alone: read before, they may be the last step's; clamped before, the copy overwrites them.
    Those on the device are reduced on another stream, which other DeepSpeeds may not wait for.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "_wait_for_offload_copies"):
        optimizer._wait_for_offload_copies()
    for name in ("reduction_stream", "reduce_and_partition_stream"):
        if (stream := getattr(optimizer, name, None)) is not None:
            get_accelerator().current_stream().wait_stream(stream)


def gather_after_writing(engine: Any) -> None:
    """Let ZeRO-3's next gather of weights wait for those being written on the current stream.

    DeepSpeed gathers on a stream of its own, which waits for no step before. Where no weight is
    persistent (stage3_param_persistence_threshold 0), nothing but the throughput timer's waits
    keeps the next forward pass from weights that are half old.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    stream = getattr(offload, "_DeepSpeedZeRoOffload__allgather_stream", None)
    if stream is not None:
        stream.wait_stream(get_accelerator().current_stream())


def drop_skipped_gradients(engine: Any) -> None:
    """Keep a step that was skipped out of the next one's gradients, after it.

    With the optimizer on the CPU and sums in fp32 beside 16-bit weights, ZeRO-2 clears them after
    the steps that it takes alone: after NaN it would skip for ever.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "cpu_offload", False) and not engine.was_step_applied():
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = {name: vars(owner)[name]} if name in vars(owner) else {}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(own)


def count_every_stage(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let ZeRO-0 in fp32 clip by the norm over all pipeline stages.

    DeepSpeed's `clip_grad_norm_` counts on the first stage alone what is not marked as split over
    model-parallel ranks: the norm is too small, and too little is clipped.
    """
    for parameter in parameters:
        parameter.model_parallel = not parameter.ds_pipe_replicated


def add_norms_over_stages_once(engine: Any) -> None:
    """Let ZeRO-1 sum the gradient norm over pipeline stages once for all parameter groups.

    DeepSpeed sums it group by group. Stages that have different numbers of groups (a rule of
    optim.groups or Muon's matrices may fit some stages alone) would wait for each other for ever.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "scaled_global_norm"):
        return
    norm_of_groups, over_stages = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def norm_of_stages(norm_type: int = 2) -> torch.Tensor:
        with _replaced(optimizer, "_model_parallel_all_reduce", lambda tensor, op: None):
            square = norm_of_groups(norm_type).square()  # infinity where one is not finite
        over_stages(tensor=square, op=dist.ReduceOp.SUM)
        return square.sqrt()

    optimizer.scaled_global_norm = norm_of_stages


LOGGED_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "reduce", "gather", "scatter"),
    *("broadcast", "send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier"),
)
"""What DeepSpeed's log of its communication can take: at any other it calls `exit(0)`."""


@contextlib.contextmanager
def latencies_by_call() -> Iterator[None]:
    """Let DeepSpeed's log of its communication note how long each collective took.

    Its timers are never set back: it notes how long all of a kind took until then.
    """
    module = sys.modules["deepspeed.comm.comm"]
    append = module.comms_logger.append

    def of_one_call(kind: str, name: str, latency_ms: float, size_bytes: int) -> None:
        module.timers(name).reset()
        append(kind, name, latency_ms, size_bytes)

    with _replaced(module.comms_logger, "append", of_one_call):
        yield


@contextlib.contextmanager
def linear_counted_once() -> Iterator[None]:
    """Let DeepSpeed's FLOPs profiler count linear layers once under ZeRO-3.

    ZeRO-3 puts its own in the place of torch's, for this and all later engines of the process; the
    profiler counts that, and the matmul in it again. Only the backward pass needs it.
    """
    with _replaced(functional, "linear", torch._C._nn.linear):
        yield


def process_groups() -> set[Any]:
    """All groups of this process, but for the copy of the whole world that DeepSpeed keeps."""
    return set(distributed_c10d._world.pg_map) - {groups._WORLD_GROUP}


def forget_stages(groups_before: set[Any]) -> None:
    """Let a process build more engines after one with pipeline stages was destroyed.

    DeepSpeed keeps the rank grid in a global of its own, and takes it for the next engine's; and it
    keeps the grid's groups, each with its threads (two hundred after ten engines on four ranks).
    """
    groups.mpu = None
    for group in process_groups() - groups_before:
        dist.destroy_process_group(group)


def reduce_in_place(engine: Any) -> None:
    """Let BF16_Optimizer reduce its flat gradients where they lie, and alone not at all.

    DeepSpeed packs them into buffers of up to half a billion elements and copies those back; on one
    rank, too, where fp32 sums are rounded to bf16 on the way.
    """

    def reduce(flats: list[torch.Tensor], group: Any, size: float | None = None) -> None:
        if dist.get_world_size(group) > 1:
            for flat in flats:
                engine.allreduce_bucket([flat], group, size)

    if hasattr(engine.optimizer, "get_grads_for_reduction"):
        engine.allreduce_and_copy = reduce


def forget_nodes() -> None:
    """Let a process build more engines after one with hpZ was destroyed.

    DeepSpeed keeps the group that shares the second copy of the weights in a global: the next
    engine with hpZ fails on it, and one without takes it for its own.
    """
    group, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, None
    if group is not None:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def printing_nothing() -> Iterator[None]:
    """Stop what PipelineModule prints whatever the log level."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def replay_adam_steps(optimizer: Any) -> None:
    """Bring DeepSpeed's Adam on the CPU to where the run was saved, exactly; after a load.

    Its C++ multiplies the powers of beta up step by step, but takes them by `pow` when it meets a
    step that does not follow the last: a resumed run would round differently from then on.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [state for state in inner.state.values() if "step" in state]
    if not states or type(inner).__name__ != "DeepSpeedCPUAdam":
        return  # CUDA's takes them by `pow` always
    value = torch.zeros(1)
    value.grad = torch.zeros(1)
    kept = inner.state, inner.param_groups
    group = {**inner.param_groups[0], "lr": 0.0, "params": [value]}
    group.pop("step", None)
    inner.state, inner.param_groups = defaultdict(dict), [group]
    try:
        for _ in range(max(int(state["step"]) for state in states)):
            inner.step()
    finally:
        inner.state, inner.param_groups = kept


def leave_muon_uncompiled() -> None:
    """Keep torch's compiler out of every start.

    Every optimizer of DeepSpeed asks whether it is its Muon, and imports that; functions in there
    go through torch.compile at once, which loads for a second or two. We call none of them.
    """
    with _replaced(compiler, "compile", lambda: compiler.dummy_decorator):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def forget_releases_with_the_trace() -> None:
    """Let ZeRO-3 keep weights from the forward to the backward pass after an early evaluation.

    Which weights it lets go of after a module, it works out once and for ever, from the order of
    modules that it saw first. Nothing comes after a forward pass alone: after one, before the first
    step, all weights would be gathered twice in every step, where max_reuse_distance spares that.
    """
    coordinator = PartitionedParameterCoordinator
    wrapped = coordinator._PartitionedParameterCoordinator__params_to_release
    cached = inspect.getclosurevars(wrapped).nonlocals["func"]  # an lru_cache
    invalidate = coordinator._invalidate_trace

    def forget(self: Any) -> None:
        cached.cache_clear()
        invalidate(self)

    coordinator._invalidate_trace = forget


def is_minimum_loss_scale(error: Exception) -> bool:
    """Whether `error` is DeepSpeed's bare Exception for a loss scale that cannot fall further."""
    return type(error) is Exception and "loss scale already at minimum" in str(error)


def allow_fp16_on_any_cpu() -> None:
    """Let fp16 run on CPUs without fp16 instructions, as torch does, if slowly.

    DeepSpeed refuses the whole run there, and with it every rehearsal of an fp16 job.
    """
    get_accelerator().is_fp16_supported = lambda: True


def silence() -> None:
    """Stop the memory reports that BF16_Optimizer prints on every rank, whatever the log level."""
    from deepspeed.runtime import bf16_optimizer

    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None


def without_shared_memory() -> None:
    """Keep DeepSpeed from building its all-reduce over shared memory; before the group is joined.

    Only tensor-parallel inference uses it, which takes gloo without it. It costs a compilation of
    a minute, leaves 69 MB per rank in /dev/shm, and its set-up spins for ever on a rank that has
    already gone (a refused run).
    """
    # As an attribute of deepspeed.comm, torch is the library.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


def wait_in_every_group(patience: timedelta) -> None:
    """Let collectives of every group wait as long as those of the first one.

    torch gives a new group its own default, 10 minutes under NCCL, whatever the first group has;
    DeepSpeed makes its groups without saying, and ZeRO reduces and gathers in a copy of the first.
    """
    distributed_c10d._get_default_timeout = lambda _backend: patience


def _compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def _ninja() -> bool:
    try:
        import ninja  # noqa: F401
    except ImportError:
        return shutil.which("ninja") is not None
    return True


def _nvcc() -> bool:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") is not None or Path(home, "bin", "nvcc").exists()
