"""Whole steps on a simulated device with streams: no operation overtakes its dependencies."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine.engines import cells, engine_of, layout, share_of
from tests.ranks import ranks


def zero(words: str, **keys: Any) -> dict[str, Any]:
    """Return a JSON in bf16 without the timer whose waits hide races from the third step on."""
    ds = layout(f"{words} bf16 fp32_sums", timers={"throughput": {"enabled": False}})
    ds["zero_optimization"] |= keys
    return ds


PINNED = {"device": "cpu", "pin_memory": True}
LION = {"optim": {"name": "lion"}}  # uses torch operations, which the simulator sees
CLIPPED = {"optim": {"name": "lion", "clip_value": 1e-3}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero1": (zero("zero1"), {}),
    "zero2": (zero("zero2", overlap_comm=True), {}),
    "zero3": (zero("zero3"), {}),
    "zero3 clipped": (zero("zero3"), CLIPPED),
    "offload1": (zero("zero1", offload_optimizer=PINNED), LION),
    "offload2": (zero("zero2", offload_optimizer=PINNED, overlap_comm=False), LION),
    "offload2 clipped": (zero("zero2", offload_optimizer=PINNED, overlap_comm=False), CLIPPED),
}
_IN_PLACE = "harness/engine/deepspeed_0_19/between_steps.py"  # of DeepSpeed's own code
_OF_FRAGMENTS = "deepspeed/runtime/zero/stage_1_and_2.py -> harness/engine/fragments.py"
_OF_WEIGHTS = "deepspeed/runtime/zero/stage3.py -> deepspeed/runtime/zero/partition_parameters.py"
# Layouts in which only our wait keeps the order: the wait, and the race without it.
OVERTAKES = {
    "zero2": ("settle_gradients", f"{_IN_PLACE} -> harness/engine/fragments.py"),
    "zero3": ("gather_after_writing", _OF_WEIGHTS),
    "offload1": ("settle_gradients", _OF_FRAGMENTS),
    "offload2": ("settle_gradients", _OF_FRAGMENTS),
    "offload2 clipped": ("settle_gradients", _OF_FRAGMENTS),
}


def seen(name: str, synchronizes: bool = True) -> dict[str, Any]:
    """Return races, reuses and waits in four steps, one judged a spike; waits of the last."""
    from tests.gates.streams.device import Timeline
    from tests.gates.streams.simulated import simulated  # imports DeepSpeed

    ds, sections = CASES[name]
    judged: list[bool] = []

    def must_skip(share: torch.Tensor, norm: torch.Tensor) -> bool:
        judged.append(len(judged) == 2 or not torch.stack([share, norm]).isfinite().all())
        return judged[-1]

    with simulated() as device, contextlib.ExitStack() as stack:
        if not synchronizes:
            stack.enter_context(mock.patch.object(Timeline, "synchronize"))
        engine = engine_of(ds, **sections)
        for number in range(4):
            device.timeline.waits.clear()
            engine.train_batch(*share_of(engine, number), 1e-3, must_skip)
            if number == 1:
                engine.eval_batch(share_of(engine)[0])
                engine.refresh_weights()
        waits = [place for _, place, _ in device.timeline.waits]
        races, reuses = dict(device.memory.races), dict(device.memory.reuses)
        engine.close()
    return {"races": races, "reuses": reuses, "waits": waits}


@pytest.mark.parametrize("name", cells(CASES, ("zero3 clipped",)))
@ranks(2)
def test_simulated_streams_have_no_race(name: str) -> None:
    """Our own code never makes the host wait; DeepSpeed's waits are counted."""
    facts = seen(name)
    assert facts["races"] == {}
    assert facts["reuses"] == {}
    assert facts["waits"]
    own = [place for place in facts["waits"] if place.startswith("harness/")]
    assert [place for place in own if not place.startswith(_IN_PLACE)] == []


def files(race: str) -> str:
    first, second = race.split(" -> ")
    return f"{first.partition(':')[0]} -> {second.partition(':')[0]}"


@pytest.mark.parametrize("name", cells(OVERTAKES, ("offload2 clipped",)))
@ranks(2)
def test_stream_simulation_finds_races_of_removed_waits(name: str) -> None:
    """DeepSpeed does not wait for the whole device either, except when it offloads.

    Clamping races with the copy that it does not wait for, and so does the norm: the same number of
    places.
    """
    from harness.engine.deepspeed_0_19 import gradients

    wait, expected = OVERTAKES[name]
    with mock.patch.object(gradients, wait):
        races = seen(name, synchronizes="offload" in name)["races"]
    assert expected in {files(race) for race in races}
    if name == "offload2 clipped":
        places = {race.partition(" -> ")[2] for race in races if "fragments.py" in race}
        assert len(places) == 2
