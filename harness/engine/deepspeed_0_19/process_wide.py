"""Replaces names of DeepSpeed and torch, once per process, before the ranks join."""

import importlib
import inspect
import sys
from datetime import timedelta
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer, compiler
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch.distributed import distributed_c10d

from harness.engine.deepspeed_0_19.replaced import replaced


def without_shared_memory() -> None:
    """Keep DeepSpeed from building its shared-memory all-reduce; before the group is joined.

    Only tensor-parallel inference uses it, and that falls back to gloo. It takes a minute to
    compile, leaves 69 MB per rank in /dev/shm, and its setup spins forever if another rank has
    already left (a rejected run).
    """
    # deepspeed.comm.torch is the torch library; its own module is only in sys.modules.
    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None


def allow_fp16_on_any_cpu(accelerator: str) -> None:
    """Let fp16 run on CPUs without fp16 instructions, as torch does, if slowly.

    DeepSpeed rejects the whole run there, and with it every rehearsal of an fp16 job.
    """
    if accelerator == "cpu":
        get_accelerator().is_fp16_supported = lambda: True


def wait_in_every_group(patience: timedelta) -> None:
    """Give all groups the collective timeout of the first one.

    torch gives a new group its default (10 minutes under NCCL), and DeepSpeed, which reduces and
    gathers in groups of its own, sets none.
    """
    distributed_c10d._get_default_timeout = lambda backend: patience


def forget_releases_with_the_trace() -> None:
    """Let ZeRO-3 keep weights from the forward to the backward pass after an early evaluation.

    DeepSpeed determines only once, from the first order of modules that it sees, after which module
    it releases a weight. In an evaluation nothing follows the forward pass. After an evaluation
    before the first step, every step would gather all weights twice, in spite of
    max_reuse_distance.
    """
    coordinator = PartitionedParameterCoordinator
    wrapped = coordinator._PartitionedParameterCoordinator__params_to_release
    cached = inspect.getclosurevars(wrapped).nonlocals["func"]  # an lru_cache
    invalidate = coordinator._invalidate_trace

    def forget(self: Any) -> None:
        cached.cache_clear()
        invalidate(self)

    coordinator._invalidate_trace = forget


def leave_muon_uncompiled() -> None:
    """Keep torch's compiler, which takes a second or two, from being loaded at start-up.

    Every DeepSpeed optimizer imports DeepSpeed's Muon, whose functions are decorated with
    torch.compile. The harness never calls them.
    """
    with replaced(compiler, "compile", lambda: compiler.dummy_decorator):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def silence() -> None:
    """Suppress the memory reports that BF16_Optimizer prints on every rank at any log level."""
    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None
