"""Counts the live bytes of a case on one rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from harness.data.batch import Batch
from harness.layout.world import World
from harness.models.recompute import saved_by
from harness.run.live_memory import live_storages
from tests.gates.cell import Case, Job
from tests.gates.engines import build_engine


def load_evenly(engine: Any) -> None:
    """Make each of an engine's divided experts receive equally many tokens."""
    for name, module in engine.module.named_modules():
        if name.endswith(".experts"):
            module.forward = _evenly(module.forward, module.num_experts * engine.plan.grid.expert)


def _evenly(forward: Any, experts: int) -> Any:
    def evenly(states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        each = torch.arange(index.numel(), device=index.device) % experts
        return forward(states, each.view_as(index), weights)

    return evenly


@dataclass
class Rise:
    """Rise of allocated bytes above their start."""

    bytes: int = 0


@contextmanager
def rise(mapped: int = 0) -> Iterator[Rise]:
    """Follow every allocation of the CPU allocator while the body runs, including those of C++.

    `mapped` bytes of mapped files are left out: safetensors maps the whole file for each tensor
    that it reads, and the kernel drops those pages if memory is short.
    """
    highest = Rise()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield highest
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and abs(event.nbytes()) != mapped
    )
    now = 0
    for _, size in changes:
        now += size
        highest.bytes = max(highest.bytes, now)


def hold(job: Job, world: World, device: torch.device, out: Path) -> list[dict[str, Any]]:
    """Return the bytes of every rank's live storages once built, with gradients ready and between
    steps, and the peaks.

    If tensors or sequences are divided, activations recomputed or the loss chunked, also return the
    bytes saved for the backward pass. Collective.
    """
    torch.manual_seed(0)
    assert isinstance(job.cell, Case)
    by_rank: list[Any] = [None] * world.world_size
    dist.all_gather_object(by_rank, _held(job.cell, world, device, out))
    return by_rank


def _held(case: Case, world: World, device: torch.device, out: Path) -> dict[str, Any]:
    before = live_storages()
    points: dict[str, Any] = {}

    def count(point: str) -> None:
        time.sleep(0.05)  # gloo's threads may still hold the tensor of a gathered object
        storages = {key: storage for key, storage in live_storages().items() if key not in before}
        sizes = sorted(((s.nbytes(), str(dtype)) for s, dtype in storages.values()), reverse=True)
        points[point] = {"bytes": sum(size for size, _ in sizes), "largest": sizes[:60]}

    plan = case.plan(world, out, {"name": case.optimizer})
    engine = build_engine(plan, device)
    if case.counts_saved:
        _count_saved(engine)
    if case.how.expert > 1:
        load_evenly(engine)
    count("built")
    vocab_size = plan.model_config["vocab_size"]
    data_rank = plan.share.data_rank if plan.grid.tensor > 1 else world.rank
    generator = torch.Generator().manual_seed(0 if case.is_divided else data_rank)
    ids = torch.randint(0, vocab_size, (1, case.seq_len), generator=generator)
    # Distinct objects: the engine recognizes the last micro-batch by identity.
    batches = [Batch(ids, ids.clone(), None) for _ in range(plan.grad_accum)]
    tokens = case.seq_len * plan.global_batch
    for _ in range(2):  # Adam allocates its moments in step 1, ZeRO 3 has its trace after it
        engine.accumulate(batches, tokens)
        engine.apply(1e-4)
    count("between_steps")
    peaks = {}
    with rise() as rose:
        engine.accumulate(batches, tokens)
    peaks["accumulate"] = points["between_steps"]["bytes"] + rose.bytes
    count("gradients_ready")
    with rise() as rose:
        engine.apply(1e-4)
    peaks["apply"] = points["gradients_ready"]["bytes"] + rose.bytes
    count("between_steps")
    optimizer = engine.describe()["optimizer"]
    if case.counts_saved and plan.zero_stage < 3:
        points["saved"] = {"bytes": engine.saved}
    engine.close()
    return {"optimizer": optimizer, "points": points, "peaks": peaks}


def _count_saved(engine: Any) -> None:
    """Make an engine record in `saved` the bytes that autograd kept in its last forward pass."""
    forward_of = engine.forward.in_training

    def forward(*args: Any) -> Any:
        with saved_by(engine.module) as saved:
            outputs = forward_of(*args)
        engine.saved = saved.bytes
        return outputs

    engine.forward.in_training = forward
