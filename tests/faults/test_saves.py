"""Kills and signals at every boundary of a save, in steps and in evaluations."""

from __future__ import annotations

import pytest

from harness.runfolder import RunFolder
from tests.faults.checks import SAVE_EVERY, check_survived, executed
from tests.faults.conftest import Trial
from tests.tiers import rest_in_gate
from tests.two_ranks import events

# Place, rank, n-th time. The third save is the first that removes a checkpoint.
KILLS = [
    *(("inside a file", rank, 2) for rank in (0, 1)),
    ("after the folder", 0, 2),
    *(("after a file", rank, 2) for rank in (0, 1)),
    *((place, 0, 3) for place in ("before the manifest", "before the rename", "after the rename")),
    *((place, 0, 3) for place in ("before the pointer", "before retention")),
    ("during retention", 0, 1),
    *(("in a step", rank, 4) for rank in (0, 1)),
    ("in an evaluation", 1, 3),
]


@pytest.mark.fault("kill -9 of a rank")
@pytest.mark.parametrize(("place", "rank", "nth"), rest_in_gate("faults", KILLS))
def test_a_kill_loses_no_more_than_the_steps_since_the_last_save(
    place: str, rank: int, nth: int, trial: Trial, undisturbed: RunFolder
) -> None:
    trial.kill(rank, place, nth)
    saved = [event["step"] for event in events(trial.run, "saved")]
    trial.start()
    check_survived(trial.run, undisturbed)
    (resumed,) = events(trial.run, "resumed")
    assert resumed["step"] >= max(saved)


@pytest.mark.gate("faults")
@pytest.mark.fault("kill -9 before the first save")
def test_a_kill_before_the_first_save_begins_again(trial: Trial, undisturbed: RunFolder) -> None:
    trial.kill(1, "in a step", 2)
    trial.start()
    check_survived(trial.run, undisturbed, resumed=False)
    assert len(events(trial.run, "began_again")) == 1


SIGNALS = [
    ("term", "in a step", 0, 3),
    ("usr1", "in a step", 1, 4),
    ("term", "before a save", 0, 2),
    ("usr1", "inside a file", 1, 2),
    ("term", "after a file", 0, 1),
    ("usr1", "in an evaluation", 1, 2),
]


@pytest.mark.fault("SIGTERM or SIGUSR1 to a rank, twice")
@pytest.mark.parametrize(("name", "place", "rank", "nth"), rest_in_gate("faults", SIGNALS))
def test_a_signal_leads_to_one_save_of_all_and_code_75(
    name: str, place: str, rank: int, nth: int, trial: Trial, undisturbed: RunFolder
) -> None:
    trial.start(code=75, rank=rank, at=place, nth=nth, do=name)
    trial.start()
    check_survived(trial.run, undisturbed)
    done = executed(trial.run)
    assert done == list(range(1, len(done) + 1))  # nothing is done twice


@pytest.mark.gate("faults")
@pytest.mark.fault("kill -9 during a save in the background")
@pytest.mark.parametrize(("place", "rank"), [("inside a file", 1), ("before the rename", 0)])
def test_a_kill_during_a_save_in_the_background(
    place: str, rank: int, trial: Trial, undisturbed: RunFolder
) -> None:
    trial.kill(rank, place, 2, "save.async=true")
    trial.start("save.async=true")
    # A save that is under way is not there yet.
    check_survived(trial.run, undisturbed, lost=2 * SAVE_EVERY)
