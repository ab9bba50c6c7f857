"""Replacements of names of DeepSpeed and torch once per process, before the ranks are joined."""

from __future__ import annotations

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
    """Keep DeepSpeed from building its all-reduce over shared memory; before the group is joined.

    Only tensor-parallel inference uses it, which takes gloo without it. It costs a compilation of
    a minute, leaves 69 MB per rank in /dev/shm, and its set-up spins for ever on a rank that has
    already gone (a refused run).
    """
    # As an attribute of deepspeed.comm, torch is the library.
    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None


def allow_fp16_on_any_cpu(accelerator: str) -> None:
    """Let fp16 run on CPUs without fp16 instructions, as torch does, if slowly.

    DeepSpeed refuses the whole run there, and with it every rehearsal of an fp16 job.
    """
    if accelerator == "cpu":
        get_accelerator().is_fp16_supported = lambda: True


def wait_in_every_group(patience: timedelta) -> None:
    """Let collectives of every group wait as long as those of the first one.

    torch gives a new group its own default, 10 minutes under NCCL, whatever the first group has;
    DeepSpeed makes its groups without saying, and ZeRO reduces and gathers in a copy of the first.
    """
    distributed_c10d._get_default_timeout = lambda backend: patience


def forget_releases_with_the_trace() -> None:
    """Let ZeRO-3 keep weights from the forward to the backward pass after an early evaluation.

    It works out once and for ever, from the order of modules that it saw first, after which module
    it lets go of a weight. Nothing comes after a forward pass alone: after one, before the first
    step, all weights would be gathered twice in every step, which max_reuse_distance spares.
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
    """Keep torch's compiler out of every start.

    Every optimizer of DeepSpeed asks whether it is its Muon, and imports that; functions in there
    go through torch.compile at once, which loads for a second or two. We call none of them.
    """
    with replaced(compiler, "compile", lambda: compiler.dummy_decorator):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def silence() -> None:
    """Stop the memory reports that BF16_Optimizer prints on every rank, whatever the log level."""
    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None
