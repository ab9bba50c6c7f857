"""The model of torch's allocator: rounding, segments, splits, streams; reserved memory."""

from dataclasses import replace
from typing import Any

import pytest

from harness.config.run_config import RunConfig
from harness.estimate.hardware import GPUS
from harness.estimate.host import GENERATIONS, driver_bytes, generation_of
from harness.estimate.memory_item import GIB
from harness.estimate.reserved import Allocator, _Tape, reserved_bytes
from harness.estimate.timeline import Estimate, estimate_memory
from harness.layout.grid import Grid
from harness.layout.world import World
from harness.plan.make import make_plan

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "segment", "block_size"),
    [
        (1, 2 * MIB, 512),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (33 * MIB, 34 * MIB, 34 * MIB),
    ],
)
def test_a_segment_is_as_large_as_torch_makes_it(size: int, segment: int, block_size: int) -> None:
    allocator = Allocator()
    block = allocator.allocate(size)
    assert block.size == block_size
    allocator.free(block)
    assert allocator.reserved == segment


def test_the_smallest_block_that_is_large_enough_is_split() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(size * MIB) for size in (100, 40)]
    for block in blocks:
        allocator.free(block)
    first, second = allocator.allocate(30 * MIB), allocator.allocate(90 * MIB)
    assert allocator.reserved == 140 * MIB
    third = allocator.allocate(10 * MIB)  # from either remainder
    assert allocator.reserved == 140 * MIB
    assert allocator.allocate(20 * MIB)
    assert allocator.reserved == 160 * MIB
    for block in (first, second, third):
        allocator.free(block)
    assert allocator.allocate(100 * MIB)  # its parts have merged
    assert allocator.reserved == 160 * MIB


def test_allocator_shares_no_block_between_streams() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(64 * MIB, "gathers"))
    allocator.allocate(64 * MIB)
    assert allocator.reserved == 128 * MIB


def test_segments_that_grow_put_freed_blocks_together() -> None:
    sizes = [64 * MIB] * 4
    reserved = []
    for expandable in (False, True):
        allocator = Allocator(expandable)
        blocks = [allocator.allocate(size) for size in sizes]
        for block in blocks:
            allocator.free(block)
        allocator.allocate(sum(sizes))
        reserved.append(allocator.reserved)
    assert reserved == [512 * MIB, 260 * MIB]  # in pages of 20 MiB each time it grows


def test_every_gpu_has_a_generation() -> None:
    named = [gpu for generation in GENERATIONS.values() for gpu in generation.gpus]
    assert sorted(named) == sorted(GPUS)
    assert generation_of(None) == GENERATIONS["hopper"]
    for generation in GENERATIONS.values():
        for low, high in (generation.context, generation.first, generation.more):
            assert 0 < low < high


def test_more_communicators_take_more_driver_memory() -> None:
    alone, together = (driver_bytes(Grid(ranks), "a100-80") for ranks in (1, 8))
    assert alone == ((450 + 250) * MIB, (950 + 1500) * MIB)
    assert together == ((450 + 270) * MIB, (950 + 1800) * MIB)


def estimated(
    gpu: str, allocators: str | None = None, stage: int = 2, **run: dict[str, Any]
) -> Estimate:
    world = World(8, accelerator="cuda", gpu=gpu, allocators=allocators)
    world = replace(world, rank=0, world_size=8, local_world_size=8)
    ds = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    plan = make_plan(RunConfig.model_validate({"model": {"name": "llama-1b"}} | run), ds, world)
    return plan.estimate


LONG = {"data": {"seq_len": 8192}, "train": {"micro_batch": 4, "global_batch": 32}}


def test_reserved_memory_is_between_allocated_and_unshared_sum() -> None:
    conf = "PYTORCH_ALLOC_CONF=x"
    ours, plain = (estimated("h100-80", how, **LONG).worst for how in (None, conf))
    for rank in (ours, plain):
        assert rank.peak <= rank.reserved.low <= rank.reserved.high <= 1.5 * rank.peak
        assert rank.shown == rank.reserved.plus(rank.driver)
    assert ours.peak == plain.peak
    assert ours.reserved.high < plain.reserved.high


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_layers_that_fit_fit_again(model: str, stage: int, expandable: bool, monkeypatch) -> None:
    """Layers of the backward pass that are not replayed change nothing."""

    def leave_each(tape: _Tape) -> None:
        while len(tape._layers) > 1:
            blocks = [tape._allocator.allocate(size) for size in tape._again]
            for block in blocks:
                tape._allocator.free(block)
            tape._drop_layers(len(tape._layers) - 1)

    run = {"model": {"name": model, "checkpointing": "full"}}
    estimate = estimated("h100-80", stage=stage, **run)
    rank = estimate.worst
    reserved = reserved_bytes(rank.inputs, rank.parts, expandable)
    monkeypatch.setattr(_Tape, "_leave_layers", leave_each)
    assert reserved == reserved_bytes(rank.inputs, rank.parts, expandable)


def test_fits_is_said_of_the_upper_end_and_tight_between() -> None:
    made = estimated("h100-80", **LONG)
    shown = made.worst.shown
    sizes = (shown.high, shown.high - 1, made.needed, made.needed - 1)
    verdicts = [estimate_memory(made.inputs, size).verdict for size in sizes]
    assert verdicts == ["fits", "tight", "tight", "does not fit"]


def test_driver_memory_json_has_every_part() -> None:
    estimate = estimated("h100-80", **LONG)
    report, rank = estimate.to_json(), estimate.worst
    assert report["allocated_gib"] == pytest.approx(rank.peak / GIB, abs=1e-3)
    for name in ("reserved", "driver", "shown"):
        sizes = [end / GIB for end in getattr(rank, name)]
        assert report[f"{name}_gib"] == pytest.approx(sizes, abs=1e-3)
