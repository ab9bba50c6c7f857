"""Sends metrics lines to TensorBoard, Weights & Biases and MLflow, under the run's name."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from harness.config.sections import LogConfig
from harness.runfolder import Outcome, RunFolder

Values = dict[str, float]
_COUNTERS = ("step", "attempt", "unix_time_s")


class Tracker(Protocol):
    """A run in an external tracker; a resumed run continues it."""

    def write(self, values: Values, step: int, unix_time_s: float) -> None:
        """Send the values of a step."""

    def close(self, outcome: Outcome) -> None:
        """Flush and close the tracker."""


def metrics_of(line: Mapping[str, Any]) -> Values:
    """Return the numbers of a metrics line under tracker names: eval/loss, train/loss."""
    values = {}
    for name, value in line.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in _COUNTERS:
            values[_name(name)] = float(value)
    return values


def _name(name: str) -> str:
    if name.startswith(("eval_", "old_eval_")):
        return f"eval/{name.replace('eval_', '', 1)}"
    return name if name.startswith(("attention_", "loss/")) else f"train/{name}"


class Trackers:
    """The trackers enabled by log.*, on rank 0. One that fails is disabled; the run continues."""

    def __init__(self, event: Callable[..., None]) -> None:
        """`event` records an event."""
        self._event = event
        self._trackers: dict[str, Tracker] = {}

    def open(self, log: LogConfig, folder: RunFolder, plan: dict[str, Any], step: int) -> None:
        """Open the trackers for a run folder, after `step` steps."""
        for name, opened in _OPENED.items():
            if setting := getattr(log, name):
                with self._leaving_out(name):
                    self._trackers[name] = opened(setting, folder, plan, step)

    def write(self, line: Mapping[str, Any]) -> None:
        """Send a metrics line."""
        values = metrics_of(line)
        for name, tracker in [*self._trackers.items()]:
            with self._leaving_out(name):
                tracker.write(values, line["step"], line["unix_time_s"])

    def close(self, outcome: Outcome) -> None:
        """Flush and close all trackers."""
        for name, tracker in [*self._trackers.items()]:
            with self._leaving_out(name):
                tracker.close(outcome)
        self._trackers.clear()

    @contextlib.contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of a network, server or disk
            self._trackers.pop(name, None)
            message = f"log.{name} is disabled from now on: {type(error).__name__}: {error}"
            self._event("tracker_failed", message=message)


class _TensorBoard:
    def __init__(self, _: bool, folder: RunFolder, plan: dict[str, Any], step: int) -> None:
        self._folder, self._last = folder.path / "tensorboard", step - 1
        self._writer = self._open(step + 1)
        self._writer.add_text("plan", f"```\n{json.dumps(plan, indent=2)}\n```", step)

    def _open(self, purge_step: int) -> Any:
        """Return a writer; earlier points from `purge_step` on are no longer shown."""
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        return writer(self._folder, purge_step=purge_step, flush_secs=10)

    def write(self, values: Values, step: int, unix_time_s: float) -> None:
        if step <= self._last:  # after a rollback
            self._writer.close()
            self._writer = self._open(step)
        self._last = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=unix_time_s)

    def close(self, _: Outcome) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, project: str, folder: RunFolder, plan: dict[str, Any], _: int) -> None:
        import wandb

        entity, _slash, name = project.rpartition("/")
        ids = folder.read_trackers()
        identity = ids.get("wandb") or secrets.token_hex(4)
        self._run: Any = wandb.init(
            project=name,
            entity=entity or None,
            name=folder.path.resolve().name,
            id=identity,
            resume="allow",
            dir=str(folder.path),
            config=plan,
            # wandb would otherwise replace the terminal with pipes.
            settings=wandb.Settings(silent=True, console="off"),
        )
        # wandb's own step counter cannot go back, as a resumed run's may.
        self._run.define_metric("*", step_metric="step")
        folder.write_trackers({**ids, "wandb": identity})

    def write(self, values: Values, step: int, unix_time_s: float) -> None:
        self._run.log({**values, "step": step, "unix_time_s": unix_time_s})

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=0 if outcome in ("done", "stopped") else 1)


class _MLflow:
    def __init__(self, experiment: str, folder: RunFolder, plan: dict[str, Any], _: int) -> None:
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:
            address = (folder.path / "mlflow").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow
        from mlflow.entities import Metric

        self._metric, self._client = Metric, mlflow.MlflowClient(tracking_uri=address)
        ids = folder.read_trackers()
        if "mlflow" in ids:
            self._id = ids["mlflow"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            old = self._client.get_experiment_by_name(experiment)
            number = old.experiment_id if old else self._client.create_experiment(experiment)
            name = folder.path.resolve().name
            self._id = self._client.create_run(number, run_name=name).info.run_id
            self._client.log_dict(self._id, plan, "plan.json")
            folder.write_trackers({**ids, "mlflow": self._id})

    def write(self, values: Values, step: int, unix_time_s: float) -> None:
        milliseconds = round(1000 * unix_time_s)
        metrics = [self._metric(name, v, milliseconds, step) for name, v in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, outcome: Outcome) -> None:
        status = {"done": "FINISHED", "stopped": "KILLED"}.get(outcome, "FAILED")
        self._client.set_terminated(self._id, status)


_OPENED: dict[str, Callable[..., Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
}
