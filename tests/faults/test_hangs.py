"""Ranks that stop, sleep or go their own way: found and named, ended, and gone on from."""

from __future__ import annotations

import re
from typing import Any

import pytest

from harness.runfolder import RunFolder
from tests.faults.checks import check_survived, executed
from tests.faults.conftest import STEPS, Trial
from tests.two_ranks import events

LIMIT_S = 6
# Limits are learned within three steps; what takes long is then a hang.
WATCHED = (f"guard.hang_floor_s={LIMIT_S}", "guard.hang_factor=10", "guard.hang_first_s=60")


def check_report(run: RunFolder, named: str) -> dict[str, Any]:
    """The one report names who holds the others up."""
    (event,) = events(run, "hang")
    assert re.search(named, event["message"]), event["message"]
    seconds = re.search(r"no progress for (\d+) s \(limit: (\d+) s\)", event["message"])
    assert seconds, event["message"]
    assert int(seconds[1]) >= int(seconds[2]) >= LIMIT_S
    return event


@pytest.mark.gate("faults")
@pytest.mark.fault("a rank under SIGSTOP")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named(rank: int, trial: Trial, undisturbed: RunFolder) -> None:
    fault = {"rank": rank, "at": "in a step", "nth": 6, "do": "stop"}
    codes = trial.hang(*WATCHED, fault=fault, patience_s=5)
    assert codes[1 - rank] == 78
    assert codes[rank] is None  # still stopped: what starts the ranks ends it
    check_report(trial.run, rf"rank {rank}.*: stopped, gone")
    status = trial.run.read_status() or {}
    assert (status["outcome"], status["code"]) == ("failed", 78)
    assert f"rank {rank}" in status["message"]
    trial.start()
    check_survived(trial.run, undisturbed)


@pytest.mark.slow("a rank is waited for until the watchdog gives up")
@pytest.mark.fault("a data loader that hangs")
def test_a_rank_that_waits_for_its_data_is_named(trial: Trial, undisturbed: RunFolder) -> None:
    fault = {"rank": 1, "at": "reading a step's batches", "nth": 6, "do": "sleep", "seconds": 1000}
    assert trial.hang(*WATCHED, fault=fault) == [78, 78]
    event = check_report(trial.run, r"rank 1 on .*, in 'data' of step \d, .*is behind")
    assert "1 ranks (0) in 'step'" in event["message"]
    status = trial.run.read_status() or {}
    assert (status["outcome"], status["code"]) == ("failed", 78)
    stacks = (trial.run.heartbeats_dir / "rank-00001.stacks").read_text()
    assert "load_ahead" in stacks
    trial.start()
    check_survived(trial.run, undisturbed)
    assert not trial.run.heartbeats_dir.exists()


@pytest.mark.gate("faults")
@pytest.mark.fault("a rank that leaves a collective out")
def test_a_rank_that_goes_its_own_way_is_found(trial: Trial, undisturbed: RunFolder) -> None:
    """Its next collective is an all-reduce of another size. gloo ends it there, and with it the
    other; NCCL would leave both to the watchdog.
    """
    fault = {"rank": 1, "at": "comparing replicas", "nth": 6, "do": "skip"}
    assert trial.hang(*WATCHED, "guard.replicas_every=1", fault=fault) == [1, -6]
    status = trial.run.read_status() or {}
    assert (status["outcome"], status["code"], status["step"]) == ("failed", 1, 6)
    trial.start()
    check_survived(trial.run, undisturbed)


@pytest.mark.gate("faults")
@pytest.mark.fault("slow first steps, evaluations and saves")
@pytest.mark.parametrize("at", ["in a step", "in an evaluation", "before a save"])
def test_what_is_slow_at_first_is_no_hang(at: str, trial: Trial) -> None:
    slow = {"rank": 1, "at": at, "nth": 1, "do": "sleep", "seconds": LIMIT_S + 3}
    trial.start(*WATCHED, code=0, **slow)
    assert executed(trial.run) == list(range(1, STEPS + 1))
    assert events(trial.run, "hang") == []
    assert not trial.run.heartbeats_dir.exists()


@pytest.mark.gate("faults")
@pytest.mark.fault("an export that takes its time")
def test_all_ranks_wait_for_the_export(trial: Trial) -> None:
    slow = {"rank": 0, "at": "exporting", "nth": 1, "do": "sleep", "seconds": 3 * LIMIT_S}
    ended = trial.start(*WATCHED, "save.export=true", code=0, **slow)
    assert min(ended.seconds) > 3 * LIMIT_S  # srun would end the one that is left
    assert trial.run.export_dir.exists()
