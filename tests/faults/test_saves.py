"""Kills and signals at every boundary of a save, in steps and in evaluations; failures."""

import pytest

from harness.runfolder import RunFolder
from tests.faults.conftest import SAVE_EVERY, Trial, arguments, executed
from tests.real_runs import events
from tests.tables import beside
from tests.tiers import rest_in_gate

PLACES = beside(__file__, "places.toml")


def test_every_fault_location_exists() -> None:
    from tests.faults.plant import PLACES  # imports the engine, which takes seconds

    assert "in an evaluation" in PLACES


@pytest.mark.parametrize(("place", "rank", "nth"), rest_in_gate("faults", PLACES["kills"]))
def test_a_kill_loses_no_more_than_the_steps_since_the_last_save(
    place: str, rank: int, nth: int, trial: Trial, undisturbed: RunFolder
) -> None:
    trial.kill(rank, place, nth)
    saved = [event["step"] for event in events(trial.run, "saved")]
    trial.go_on(undisturbed)
    (resumed,) = events(trial.run, "resumed")
    assert resumed["step"] >= max(saved)


@pytest.mark.gate("faults")
def test_a_kill_before_the_first_save_begins_again(trial: Trial, undisturbed: RunFolder) -> None:
    trial.kill(1, "in a step", 2)
    trial.go_on(undisturbed, resumed=False)
    assert len(events(trial.run, "began_again")) == 1


@pytest.mark.parametrize(
    ("name", "place", "rank", "nth"), rest_in_gate("faults", PLACES["signals"])
)
def test_a_signal_leads_to_one_save_of_all_and_code_75(
    name: str, place: str, rank: int, nth: int, trial: Trial, undisturbed: RunFolder
) -> None:
    trial.start(code=75, rank=rank, at=place, nth=nth, do=name)
    trial.go_on(undisturbed)
    done = executed(trial.run)
    assert done == list(range(1, len(done) + 1))  # no step is repeated


@pytest.mark.gate("faults")
@pytest.mark.parametrize(("place", "rank"), [("inside a file", 1), ("before the rename", 0)])
def test_a_kill_during_a_save_in_the_background(
    place: str, rank: int, trial: Trial, undisturbed: RunFolder
) -> None:
    trial.kill(rank, place, 2, "save.async=true")
    # A save in progress does not exist yet.
    trial.go_on(undisturbed, "save.async=true", lost=2 * SAVE_EVERY)


PATIENCE_S = 30.0  # how long ranks may outlive the one that failed


@pytest.mark.parametrize(("place", "nth", "rank"), rest_in_gate("faults", PLACES["failures"]))
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
    assert trial.failed(1)["message"] == why


@pytest.mark.gate("faults")
def test_status_names_the_newest_checkpoint_during_training(trial: Trial) -> None:
    fault = {"rank": 0, "at": "before a save", "nth": 3, "do": "kill"}
    ended = trial.zygote.run(arguments(trial.path, trial.data), trial.logs, fault, ranks=1)
    assert ended.codes == [-9], ended.output
    status = trial.run.read_status() or {}
    assert (status["outcome"], status["step"]) == ("running", 4)


@pytest.mark.gate("faults")
@pytest.mark.parametrize("background", ["false", "true"])
def test_a_save_starts_no_thread(background: str, trial: Trial) -> None:
    """Python waits forever for a thread that cannot start."""
    fault = {"rank": 1, "at": "before a save", "nth": 1, "do": "starve"}
    ended = trial.start("train.steps=4", f"save.async={background}", **fault)
    assert ended.codes == [0, 0]
    assert [event["step"] for event in events(trial.run, "saved")] == [2, 4]
