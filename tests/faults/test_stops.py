"""Runs that stop of their own accord: before their time is up, in the middle of an evaluation."""

from __future__ import annotations

import pytest

from tests.faults.checks import check_tidy, curve, executed, newest
from tests.faults.conftest import Trial
from tests.two_ranks import events

# Evaluations long enough to be broken off: 32 micro-batches on each rank, four times 8.
LONG = ("data.held_out=0.4", "eval.samples=64", "train.micro_batch=1")


@pytest.mark.gate("faults")
@pytest.mark.fault("SIGTERM in a long evaluation")
def test_a_stop_breaks_an_evaluation_off_which_is_made_up_for(trial: Trial) -> None:
    undisturbed = Trial(trial.logs / "undisturbed", trial.logs / "logs", trial.data, trial.zygote)
    undisturbed.start(*LONG)
    trial.start(*LONG, code=75, rank=1, at="in an evaluation", nth=2, do="term")
    (stopped,) = [line for line in trial.run.read_metrics() if line["step"] == 3]
    assert "eval_loss" not in stopped
    assert (trial.run.read_status() or {})["step"] == 3
    trial.start(*LONG)
    assert curve(trial.run) == curve(undisturbed.run)
    assert executed(trial.run) == list(range(1, 9))


@pytest.mark.gate("faults")
@pytest.mark.fault("the time limit")
def test_a_run_saves_and_ends_before_its_time_is_up(trial: Trial) -> None:
    endless = ("train.steps=100000", "optim.schedule=constant", "save.every=20")
    trial.start(*endless, "guard.time_limit_s=30", code=75)
    run = trial.run
    (event,) = events(run, "stopped")
    assert "asked to stop by the time limit" in event["message"]
    done = executed(run)
    assert len(done) > 4
    assert newest(run).name == f"step-{done[-1]:08d}"
    check_tidy(run)
    trial.start(*endless[1:], f"train.steps={done[-1] + 2}")
    assert executed(run) == list(range(1, done[-1] + 3))
