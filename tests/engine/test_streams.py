"""Whole steps on a simulated device with streams: nothing overtakes what it depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Result = Callable[[str], list[Any]]
CASES = {"zero1", "zero2", "zero3", "zero3 clipped", "offload1", "offload2", "offload2 clipped"}
# Without our waits: who reads, or writes, what is still being written.
OVERTAKES = {
    "zero2": "deepspeed/runtime/zero/stage_1_and_2.py -> harness/engine/fragments.py",
    "zero3": "deepspeed/runtime/zero/stage3.py -> deepspeed/runtime/zero/partition_parameters.py",
    "offload1": "deepspeed/runtime/zero/stage_1_and_2.py -> harness/engine/fragments.py",
    "offload2": "deepspeed/runtime/zero/stage_1_and_2.py -> harness/engine/fragments.py",
    "offload2 clipped": "deepspeed/runtime/zero/stage_1_and_2.py -> harness/engine/fragments.py",
}


def files(race: str) -> str:
    first, second = race.split(" -> ")
    return f"{first.partition(':')[0]} -> {second.partition(':')[0]}"


@pytest.mark.slow
def test_no_stream_and_no_host_overtakes_another(result: Result) -> None:
    for rank in result("streams_wait_for_each_other"):
        for kind in ("races", "reuses"):
            assert {name: facts[kind] for name, facts in rank.items()} == {n: {} for n in CASES}


@pytest.mark.slow
def test_the_host_waits_for_nothing_in_our_own_code(result: Result) -> None:
    for rank in result("streams_wait_for_each_other"):
        for name, facts in rank.items():
            assert facts["waits"], name  # DeepSpeed's: they are counted
            assert [place for place in facts["waits"] if place.startswith("harness/")] == [], name


@pytest.mark.slow
def test_without_the_waits_the_simulation_finds_races(result: Result) -> None:
    for rank in result("nothing_waits"):
        assert set(rank) == set(OVERTAKES)
        for name, facts in rank.items():
            assert OVERTAKES[name] in {files(race) for race in facts["races"]}, name


@pytest.mark.slow
def test_clamping_races_with_the_copy_that_it_does_not_wait_for(result: Result) -> None:
    """Both the norm and the clamped elements: as many places in fragments.py."""
    for rank in result("nothing_waits"):
        races = [race for race in rank["offload2 clipped"]["races"] if "fragments.py" in race]
        assert len({race.partition(" -> ")[2] for race in races}) == 2
