"""Runs that stop, by signals or because ranks stop, sleep or leave, are named and resume."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.runfolder import RunFolder
from tests.faults.conftest import STEPS, Trial, arguments, check_tidy, curve, executed, newest
from tests.real_runs import TRAIN, environment, events, wait_for
from tests.run.test_notify import SECRET, webhook
from tests.tables import beside
from tests.tiers import rest_in_gate

STARTS = beside(__file__, "places.toml")["starts"]


@pytest.mark.parametrize(("name", "place", "rank"), rest_in_gate("faults", STARTS))
def test_a_signal_at_start_ends_all_with_75(name: str, place: str, rank: int, trial: Trial) -> None:
    ended = trial.start(code=75, rank=rank, at=place, do=name)
    assert f"asked to stop by {'Ctrl-C' if name == 'int' else 'SIG'}" in ended.output
    assert "Traceback" not in ended.output
    assert trial.run.read_metrics() == []
    status = trial.run.read_status()
    if place in ("before the folder", "before the plan"):
        assert (status["outcome"], status["code"], status["step"]) == ("stopped", 75, 0)
    else:
        assert not trial.path.exists()


@pytest.mark.gate("faults")
def test_two_signals_while_ranks_start_end_all_at_once(trial: Trial) -> None:
    ended = trial.start(code=75, rank=1, at="before the engine", do="term")
    assert "rank 1 failed: asked twice to stop" in ended.output
    assert "Traceback" not in ended.output
    assert not trial.path.exists()


@pytest.mark.gate("faults")
def test_a_closed_terminal_stops_a_run_like_sigterm(trial: Trial) -> None:
    trial.start(code=75, rank=1, at="in a step", nth=3, do="hup")
    (event,) = events(trial.run, "stopped")
    assert "asked to stop by" in event["message"]
    assert events(trial.run, "saved")[-1]["step"] == event["step"]


@pytest.mark.gate("faults")
def test_a_signal_during_the_imports_is_noted(data: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(TRAIN), *arguments(tmp_path / "run", data)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        status = Path(f"/proc/{process.pid}/status")

        def is_noting() -> bool:
            caught = re.search(r"SigCgt:\s*(\w+)", status.read_text())
            return bool(caught and int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)

        wait_for(is_noting, "the first lines of train.py", 60)
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 75, errors
    assert "stopped before the first step: asked to stop by SIGUSR1" in errors
    assert not (tmp_path / "run").exists()


# Evaluations long enough to interrupt: 32 micro-batches on each rank, four times 8.
LONG = ("data.held_out=0.4", "eval.samples=64", "train.micro_batch=1")


@pytest.mark.gate("faults")
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


@pytest.mark.gate("faults")
def test_a_used_up_budget_ends_a_run_that_a_larger_one_resumes(trial: Trial) -> None:
    small, run = "guard.budget_gpu_hours=10", trial.run
    with webhook() as (address, notices):
        common = ("save.export=true", f"run.notify={address}", "run.owner=ada")
        ended = trial.start(*common, small, code=79, at="in a step", nth=3, do="hours")
        step = (run.read_status() or {})["step"]
        assert 2 < step < STEPS
        assert newest(run).name == f"step-{step:08d}"
        assert (run.export_dir / "config.json").exists()
        assert "eval_loss" in run.read_metrics()[-1]
        trial.start(*common, small, code=79)  # takes no step
        assert executed(run) == [*range(1, step + 1)]
        trial.start(*common, "guard.budget_gpu_hours=100")
    assert executed(run) == [*range(1, STEPS + 1)]
    assert (run.read_status() or {})["gpu_hours"] > run.read_metrics()[-1]["gpu_hours"] > 50
    said = [(notice["event"], notice["code"]) for notice in notices]
    ends = [("stopped", 79), ("stopped", 79), ("done", 0)]
    assert said == [event for end in ends for event in (("started", None), end)]
    assert {notice["owner"] for notice in notices} == {"ada"}
    for text in (ended.output, run.plan_path.read_text(), run.events_path.read_text()):
        assert SECRET not in text


LIMIT_S = 6
# Limits are learned within three steps; longer phases are then hangs.
WATCHED = (f"guard.hang_floor_s={LIMIT_S}", "guard.hang_factor=10", "guard.hang_first_s=60")


def check_report(run: RunFolder, named: str) -> dict[str, Any]:
    """Return the only report; assert that it names the rank that blocks the others."""
    (event,) = events(run, "hang")
    assert re.search(named, event["message"]), event["message"]
    seconds = re.search(r"no progress for (\d+) s \(limit: (\d+) s\)", event["message"])
    assert seconds, event["message"]
    assert int(seconds[1]) >= int(seconds[2]) >= LIMIT_S
    return event


@pytest.mark.parametrize("rank", rest_in_gate("faults", [1, 0], 1))
def test_a_rank_that_is_killed_is_named(rank: int, trial: Trial) -> None:
    state = trial.path.with_suffix(".prom")
    trial.kill(rank, "in a step", 6, f"run.notify={state}")
    assert ('state="failed"' in state.read_text()) == (rank != 0)  # rank 0 alone tells
    (event,) = events(trial.run, "failed")
    assert (event["rank"], event["attempt"]) == (rank, 1)
    status = trial.failed(1)
    assert status["step"] >= 4  # from the newest checkpoint, or where the other rank was
    killed = rf"rank {rank}.* failed: its process \d+ on .* was killed, .*; rank {1 - rank} lost"
    assert re.match(killed, status["message"]), status["message"]


@pytest.mark.gate("faults")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named(rank: int, trial: Trial, undisturbed: RunFolder) -> None:
    fault = {"rank": rank, "at": "in a step", "nth": 6, "do": "stop"}
    codes = trial.hang(*WATCHED, fault=fault, patience_s=5)
    assert codes[1 - rank] == 78
    assert codes[rank] is None  # still stopped: the launcher ends it
    check_report(trial.run, rf"rank {rank}.*: stopped, gone")
    assert f"rank {rank}" in trial.failed(78)["message"]
    trial.go_on(undisturbed)


@pytest.mark.slow("a rank is waited for until the watchdog gives up")
def test_a_rank_that_waits_for_its_data_is_named(trial: Trial, undisturbed: RunFolder) -> None:
    fault = {"rank": 1, "at": "reading a step's batches", "nth": 6, "do": "sleep", "seconds": 1000}
    assert trial.hang(*WATCHED, fault=fault) == [78, 78]
    event = check_report(trial.run, r"rank 1 on .*, in 'data' of step \d, .*: behind")
    assert "1 ranks (0) in 'step'" in event["message"]
    stacks = (trial.run.heartbeats_dir / "rank-00001.stacks").read_text()
    assert "load_ahead" in stacks
    trial.failed(78)
    trial.go_on(undisturbed)
    assert not trial.run.heartbeats_dir.exists()


@pytest.mark.gate("faults")
def test_a_rank_that_goes_its_own_way_is_found(trial: Trial, undisturbed: RunFolder) -> None:
    """An all-reduce of another size ends gloo's ranks; NCCL would leave both to the watchdog."""
    fault = {"rank": 1, "at": "comparing replicas", "nth": 6, "do": "skip"}
    assert trial.hang(*WATCHED, "guard.replicas_every=1", fault=fault) == [1, -6]
    assert trial.failed(1)["step"] == 6
    trial.go_on(undisturbed)


@pytest.mark.gate("faults")
@pytest.mark.parametrize("at", ["in a step", "in an evaluation", "before a save"])
def test_what_is_slow_at_first_is_no_hang(at: str, trial: Trial) -> None:
    slow = {"rank": 1, "at": at, "nth": 1, "do": "sleep", "seconds": LIMIT_S + 3}
    trial.start(*WATCHED, code=0, **slow)
    assert executed(trial.run) == list(range(1, STEPS + 1))
    assert events(trial.run, "hang") == []
    assert not trial.run.heartbeats_dir.exists()


@pytest.mark.gate("faults")
def test_all_ranks_wait_for_the_export(trial: Trial) -> None:
    slow = {"rank": 0, "at": "exporting", "nth": 1, "do": "sleep", "seconds": 3 * LIMIT_S}
    ended = trial.start(*WATCHED, "save.export=true", code=0, **slow)
    assert min(ended.seconds) > 3 * LIMIT_S  # srun would end the remaining one
    assert trial.run.export_dir.exists()
