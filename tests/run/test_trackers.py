"""Trackers with their real packages: a run's curve, which continues after a stop."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.config.sections import LogConfig
from harness.launch.ranks import Outcome
from harness.run.trackers import Trackers, metrics_of
from harness.runfolder import RunFolder
from tests.real_runs import run_ranks, train_command, wait_for
from tests.run.test_meter import LINE, TABLES

Scalars = dict[str, list[tuple[int, float]]]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    run = RunFolder(tmp_path / "first")
    run.open()
    yield run
    run.close()


def line(step: int, loss: float, **more: Any) -> dict[str, Any]:
    return {**LINE, "step": step, "loss": loss, "unix_time_s": 1e9 + step, **more}


def write(folder: RunFolder, log: LogConfig, after: int, steps: range, loss: float) -> list[str]:
    """Log one attempt of a run; return the problems that it met."""
    problems: list[str] = []
    trackers = Trackers(lambda kind, message: problems.append(message))
    trackers.open(log, folder, {"run": {"train": {"steps": 8}}}, after)
    for step in steps:
        trackers.write(line(step, loss, eval_loss=step / 2))
    trackers.close("stopped")
    return problems


def two_attempts(folder: RunFolder, log: LogConfig) -> None:
    """Log steps 1 to 5, of which 3 were saved; then from 4 on."""
    assert write(folder, log, 0, range(1, 6), loss=1.0) == []
    assert write(folder, log, 3, range(4, 9), loss=2.0) == []


LOSSES = [(step, 1.0) for step in (1, 2, 3)] + [(step, 2.0) for step in (4, 5, 6, 7, 8)]


def read_tensorboard(path: Path) -> Scalars:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(path))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}


def test_tensorboard_shows_steps_done_again_once(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    two_attempts(folder, LogConfig(tensorboard=True))
    scalars = read_tensorboard(folder.path / "tensorboard")
    assert scalars["train/loss"] == LOSSES
    assert scalars["eval/loss"][-1] == (8, 4.0)


def test_tensorboard_shows_steps_once_after_a_rollback(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    trackers = Trackers(lambda kind, message: pytest.fail(message))
    trackers.open(LogConfig(tensorboard=True), folder, {}, 0)
    for step, loss in [(1, 1.0), (2, 1.0), (3, 9.0), (2, 2.0), (3, 3.0), (3, 2.0)]:
        trackers.write(line(step, loss))
    trackers.close("done")
    scalars = read_tensorboard(folder.path / "tensorboard")
    assert scalars["train/loss"] == [(1, 1.0), (2, 2.0), (3, 2.0)]


def test_mlflow_goes_on_with_the_same_run(folder: RunFolder, monkeypatch: Any) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    two_attempts(folder, LogConfig(mlflow="trials"))
    client = mlflow.MlflowClient(tracking_uri=(folder.path / "mlflow").absolute().as_uri())
    experiment = client.get_experiment_by_name("trials")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "KILLED")
    assert folder.read_trackers() == {"mlflow": run.info.run_id}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {(m.step, m.value) for m in history} > set(LOSSES)
    assert max(history, key=lambda m: (m.step, m.timestamp)).value == 2.0


@pytest.mark.gate("runs")
def test_weights_and_biases_goes_on_with_the_same_run(folder: RunFolder, monkeypatch: Any) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    two_attempts(folder, LogConfig(wandb="trials"))
    identity = folder.read_trackers()["wandb"]
    # Within the same second, the second folder's name ends with -1.
    first, second = sorted((folder.path / "wandb").glob("offline-run-*"))
    for run in (first, second):
        assert identity in run.name
        file, deadline = run / f"run-{identity}.wandb", time.monotonic() + 60
        while b"train/loss" not in file.read_bytes():  # its server is still writing
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_tracker_that_fails_is_an_event_and_the_run_goes_on(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    (folder.path / "tensorboard").write_text("a file where the folder would be")
    (problem,) = write(folder, LogConfig(tensorboard=True), 0, range(1, 3), loss=1.0)
    assert problem.startswith("log.tensorboard is disabled from now on: ")


def test_tracker_metric_names() -> None:
    values = metrics_of({**LINE, **TABLES["more"]})
    assert TABLES["tracked"].items() <= values.items()
    assert not {"train/mfu", "train/step", "train/loss_by_position"} & set(values)


@pytest.fixture(scope="module")
def ran(data: list[str], tmp_path_factory) -> tuple[RunFolder, list[Outcome]]:
    """Return a run on one rank of a JSON with a monitor, stopped by its length and resumed."""
    there = tmp_path_factory.mktemp("tracked")
    run = RunFolder(there / "run")
    asked = [f"run.dir={run.path}", "ds.tensorboard.enabled=true", "eval.every=2"]
    asked += ["log.weights_every=2", "log.attention_every=4", "resume.allow=train.steps"]
    command = train_command(*data, *asked)
    first = run_ranks([*command, "train.steps=4"], there / "log-4", ranks=1)
    # TensorBoard reads files of the same second in the order of process ids, which may start again.
    now = int(time.time())
    wait_for(lambda: int(time.time()) > now, "the next second", 10)
    return run, [first, run_ranks([*command, "train.steps=6"], there / "log-6", ranks=1)]


def test_a_real_run_writes_its_measurements(ran: tuple[RunFolder, list[Outcome]]) -> None:
    run, ended = ran
    assert [attempt.codes for attempt in ended] == [[0], [0]], ended
    lines = {entry["step"]: entry for entry in run.read_metrics()}
    assert [step for step in lines if "param_norm" in lines[step]] == [2, 4, 6]
    assert all(0 < lines[step]["update_ratio"] < 0.5 for step in (2, 4, 6))
    assert [step for step in lines if "attention_entropy/1" in lines[step]] == [4]
    assert 0 < lines[4]["attention_entropy/0"] < 3.5
    assert 0 < lines[4]["attention_coverage/0"] <= 1
    by_position = [entry["loss_by_position"] for entry in lines.values() if "eval_loss" in entry]
    assert len(by_position) == 4
    assert all(len(losses) == 32 and None not in losses for losses in by_position)
    assert by_position[-1][0] != by_position[-1][-1]


def test_a_real_run_continues_its_curve(ran: tuple[RunFolder, list[Outcome]]) -> None:
    run, _ = ran
    scalars = read_tensorboard(run.path / "tensorboard")
    assert [step for step, _ in scalars["train/loss"]] == [1, 2, 3, 4, 5, 6]
    lines = {entry["step"]: entry for entry in run.read_metrics()}
    for step, value in scalars["eval/loss"]:
        assert value == pytest.approx(lines[step]["eval_loss"])
    assert [step for step, _ in scalars["train/param_norm"]] == [2, 4, 6]
    plan = json.loads(run.plan_path.read_text())
    assert plan["deepspeed"]["tensorboard"]["enabled"] is False
    assert not [*run.path.parent.rglob("DeepSpeedJobName")]
