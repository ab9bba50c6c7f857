"""One rank fails: all end with its code at once, and its traceback is on a console."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Trial, arguments
from tests.tiers import rest_in_gate
from tests.two_ranks import events

PATIENCE_S = 30.0  # how long ranks may outlive the one that failed
FAILURES = [
    (place, nth, rank)
    for place, nth in (("in a step", 5), ("in an evaluation", 2), ("reading a step's batches", 6))
    for rank in (1, 0)
]


@pytest.mark.fault("an exception on one rank, under NCCL's way to leave")
@pytest.mark.parametrize(("place", "nth", "rank"), rest_in_gate("faults", FAILURES))
def test_a_failure_of_one_rank_ends_all(place: str, nth: int, rank: int, trial: Trial) -> None:
    fault = {"rank": rank, "at": place, "nth": nth, "do": "raise", "nccl": True}
    ended = trial.start(code=1, patience_s=PATIENCE_S, **fault)
    why = "RuntimeError: a planted failure of one rank"
    assert "Traceback" in ended.outputs[rank]
    assert ended.outputs[rank].rstrip().endswith(why)
    assert "Traceback" not in ended.outputs[1 - rank]
    assert f"rank {1 - rank} ends: rank {rank} failed: {why}" in ended.outputs[1 - rank]
    (event,) = events(trial.run, "failed")
    assert (event["rank"], event["attempt"], event["message"]) == (rank, 1, why)
    status = trial.run.read_status() or {}
    assert (status["outcome"], status["code"], status["message"]) == ("failed", 1, why)


@pytest.mark.gate("faults")
@pytest.mark.fault("kill -9 of a rank: the records")
@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_kill_the_status_names_the_last_checkpoint_and_the_failure(
    rank: int, trial: Trial
) -> None:
    trial.kill(rank, "in a step", 6)
    status = trial.run.read_status() or {}
    assert (status["outcome"], status["code"]) == ("failed", 1)
    (event,) = events(trial.run, "failed")
    assert (event["rank"], event["attempt"]) == (1 - rank, 1)
    assert status["step"] >= 4  # of the newest checkpoint, or where the other rank was


@pytest.mark.gate("faults")
@pytest.mark.fault("all ranks killed: the records")
def test_while_a_run_trains_its_status_names_the_newest_checkpoint(trial: Trial) -> None:
    fault = {"rank": 0, "at": "before a save", "nth": 3, "do": "kill"}
    ended = trial.zygote.run(arguments(trial.path, trial.data), trial.logs, fault, ranks=1)
    assert ended.codes == [-9], ended.output
    status = trial.run.read_status() or {}
    assert (status["outcome"], status["step"]) == ("running", 4)


@pytest.mark.gate("faults")
@pytest.mark.fault("no memory for another thread")
@pytest.mark.parametrize("background", ["false", "true"])
def test_a_save_starts_no_thread(background: str, trial: Trial) -> None:
    """Python waits for ever for a thread that cannot begin."""
    fault = {"rank": 1, "at": "before a save", "nth": 1, "do": "starve"}
    ended = trial.start("train.steps=4", f"save.async={background}", **fault)
    assert ended.codes == [0, 0]
    assert [event["step"] for event in events(trial.run, "saved")] == [2, 4]
