"""Whole steps on a simulated device with streams: no operation overtakes its dependencies."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine.engines import cells, engine_of, layout, share_of
from tests.ranks import ranks
from tests.tables import beside


def zero(words: str, **keys: Any) -> dict[str, Any]:
    """Return a JSON in bf16 without the timer whose waits hide races from the third step on."""
    ds = layout(f"{words} bf16 fp32_sums", timers={"throughput": {"enabled": False}})
    ds["zero_optimization"] |= keys
    return ds


_TABLES = beside(__file__, "streams.toml")
CASES, OVERTAKES = _TABLES["cases"], _TABLES["overtakes"]
_IN_PLACE = "harness/engine/deepspeed_0_19/between_steps.py"  # of DeepSpeed's own code


def seen(name: str, synchronizes: bool = True) -> dict[str, Any]:
    """Return races, reuses and waits in four steps, one judged a spike; waits of the last."""
    from tests.gates.streams.device import Timeline
    from tests.gates.streams.simulated import simulated  # imports DeepSpeed

    words, keys, sections = CASES[name]
    judged: list[bool] = []

    def must_skip(share: torch.Tensor, norm: torch.Tensor) -> bool:
        judged.append(len(judged) == 2 or not torch.stack([share, norm]).isfinite().all())
        return judged[-1]

    with simulated() as device, contextlib.ExitStack() as stack:
        if not synchronizes:
            stack.enter_context(mock.patch.object(Timeline, "synchronize"))
        engine = engine_of(zero(words, **keys), **sections)
        for number in range(4):
            device.timeline.waits.clear()
            engine.train_batch(*share_of(engine, number), 1e-3, must_skip)
            if number == 1:
                engine.eval_batch(share_of(engine)[0])
                engine.refresh_weights()
        waits, memory = [place for _, place, _ in device.timeline.waits], device.memory
        facts = {"races": dict(memory.races), "reuses": dict(memory.reuses), "waits": waits}
        engine.close()
    return facts


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
