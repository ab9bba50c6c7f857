"""Signals while ranks start: all end with 75 before any step."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import Trial, arguments
from tests.tiers import rest_in_gate
from tests.two_ranks import TRAIN, environment, events, wait_for

PLACES = [
    ("usr1", "before the data", 1),
    ("int", "before joining", 0),
    ("hup", "before the engine", 1),
    ("usr1", "before the folder", 0),
    ("usr1", "before the plan", 0),
]


@pytest.mark.fault("a signal to a rank that starts")
@pytest.mark.parametrize(("name", "place", "rank"), rest_in_gate("faults", PLACES))
def test_a_signal_while_ranks_start_ends_all_with_75(
    name: str, place: str, rank: int, trial: Trial
) -> None:
    ended = trial.start(code=75, rank=rank, at=place, do=name)
    assert f"asked to stop by {'Ctrl-C' if name == 'int' else 'SIG'}" in ended.output
    assert "Traceback" not in ended.output
    assert trial.run.read_metrics() == []
    status = trial.run.read_status()
    if place in ("before the folder", "before the plan"):
        assert status is not None
        assert (status["outcome"], status["code"], status["step"]) == ("stopped", 75, 0)
    else:
        assert not trial.path.exists()


@pytest.mark.gate("faults")
@pytest.mark.fault("two signals to a rank that starts")
def test_two_signals_while_ranks_start_end_all_at_once(trial: Trial) -> None:
    ended = trial.start(code=75, rank=1, at="before the engine", do="term")
    assert "rank 1 failed: asked twice to stop" in ended.output
    assert "Traceback" not in ended.output
    assert not trial.path.exists()


@pytest.mark.gate("faults")
@pytest.mark.fault("SIGHUP to a rank that trains")
def test_a_closed_terminal_stops_a_run_like_sigterm(trial: Trial) -> None:
    trial.start(code=75, rank=1, at="in a step", nth=3, do="hup")
    (event,) = events(trial.run, "stopped")
    assert "asked to stop by" in event["message"]
    assert events(trial.run, "saved")[-1]["step"] == event["step"]


@pytest.mark.gate("faults")
@pytest.mark.fault("a signal during the imports")
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
