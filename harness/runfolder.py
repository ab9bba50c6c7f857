"""The run folder: paths and records. Only this class writes plan, metrics, events and status.

    runs/NAME/
      plan.json          all resolved settings, written before the run starts
      metrics.jsonl      one line per logged step
      events.jsonl       one line per event: changed settings, saves, skipped steps, ...
      status.json        outcome, code, step, attempt, message, gpu_hours, time
      report.html        the run as a web page (harness/report/)
      own_code-SHA.py    the file of run.code, of each start that had another one
      trackers.json      the run's id in each tracker of log.* that assigns one
      checkpoints/step-00001000/
      tokenizer/         the run's tokenizer: exports need no data
      export/            the exported Hugging Face model
      reservoir/         a sample of the training data, for replay in later runs (data.rehearse)
      profile/           trace and FLOPs of a few steps
      tensorboard/, wandb/, mlflow/   files of the trackers
      heartbeats/        phase and step of each rank, kept after a hang
      lock               the process that is writing; empty if there is none

Any process can read with `RunFolder(path)`. Writing requires `open()`, which only rank 0 calls
(`with contextlib.closing(folder)` releases the lock).
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from harness.errors import CannotSave, ConfigError
from harness.files import kept_sample
from harness.files.folder_lock import release, take_lock
from harness.files.records import (
    Unreadable,
    as_line,
    as_text,
    is_count,
    read_lines,
    read_object,
    require_file,
    writing,
)

_CHECKPOINT = re.compile(r"step-[0-9]{8}")

Outcome = Literal["running", "done", "stopped", "failed", "diverged"]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the folders named like checkpoints, oldest first, without symlinks."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if _CHECKPOINT.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


def saved_steps(run_dir: str | None) -> list[int]:
    """Return the steps of the checkpoints in a run folder, which may not exist."""
    paths = checkpoints_in(RunFolder(run_dir).checkpoints_dir) if run_dir else []
    return [int(path.name.rpartition("-")[2]) for path in paths]


class RunFolder:
    """The files of one run. The constructor does not touch the disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.trackers_path = self.path / "trackers.json"
        self.plan_path = self.path / "plan.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.status_path = self.path / "status.json"
        self.checkpoints_dir = self.path / "checkpoints"
        self.export_dir = self.path / "export"
        self.tokenizer_dir = self.path / "tokenizer"
        self.reservoir_dir = self.path / kept_sample.FOLDER
        self.profile_dir = self.path / "profile"
        self.heartbeats_dir = self.path / "heartbeats"
        self.attempt = 0
        """Number of this attempt, from 1; 0 until `open`. Set by rank 0 for all ranks."""
        self.gpu_hours_before = 0.0
        """GPU hours of earlier attempts. Set by rank 0 for all ranks."""
        self._gpus, self._began_s = 0, 0.0
        self.damaged: list[str] = []
        """Records that `open` could not read and does not need."""
        self._lock: IO[str] | None = None

    def hang_path(self, attempt: int) -> Path:
        """Return the path of the report of a hang in an attempt."""
        return self.heartbeats_dir / f"hang-{attempt}.json"

    # --- writing: between open() and close(), by one process ---

    @property
    def gpu_hours(self) -> float:
        """GPU hours of all attempts until now."""
        return self.gpu_hours_before + self._gpus * (time.monotonic() - self._began_s) / 3600

    def count_gpu_hours(self, gpus: int, began_s: float) -> None:
        """Count this attempt's GPU hours, from a time of time.monotonic() on."""
        self._gpus, self._began_s = gpus, began_s

    def open(self) -> str | None:
        """Create the folder if needed, lock it, count the attempt and set the status to running.

        Remove a line that a killed process left incomplete. Return the name of a process that died
        without releasing the lock, or None. Raises ConfigError if another process is writing here
        or a record is not a regular file, and OSError if the folder cannot be created.
        """
        for path in (self.path / "lock", self.metrics_path, self.events_path):
            require_file(path)
        heartbeats = self.heartbeats_dir
        if (heartbeats.exists() or heartbeats.is_symlink()) and not heartbeats.is_dir():
            raise ConfigError(f"{heartbeats} is not a folder: remove it")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock, stale = take_lock(self.path / "lock")
        for path in (self.metrics_path, self.events_path):
            with path.open("a+b") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        last_attempt, last_step, hours = self._last()
        self.attempt, self.gpu_hours_before = last_attempt + 1, max(hours, self._logged_hours())
        shutil.rmtree(self.heartbeats_dir, ignore_errors=True)
        self.heartbeats_dir.mkdir(exist_ok=True)
        self.write_status("running", None, last_step)
        return stale

    def close(self) -> None:
        """Release the lock, if the folder is open."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):  # on a read-only disk it stays locked
                release(lock)

    def sync(self) -> None:
        """Wait until the lines of metrics.jsonl and events.jsonl are on disk."""
        for path in (self.metrics_path, self.events_path, self.path):
            with writing(path):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Replace plan.json."""
        self._assert_open()
        self._replace(self.plan_path, plan)

    def write_code(self, source: bytes) -> None:
        """Keep the file of run.code, beside those of earlier starts."""
        self._assert_open()
        path = self.path / f"own_code-{hashlib.sha256(source).hexdigest()[:12]}.py"
        with writing(path):
            path.write_bytes(source)

    def write_trackers(self, ids: dict[str, str]) -> None:
        """Replace trackers.json: the run's id in each tracker that assigns one."""
        self._assert_open()
        self._replace(self.trackers_path, ids)

    def write_status(
        self, outcome: Outcome, code: int | None, step: int, message: str | None = None
    ) -> None:
        """Replace status.json: outcome, exit code (None while running), last step (while running,
        the step of the newest checkpoint) and the reason for a failure.
        """
        self._assert_open()
        self._write_status(outcome, code, step, message)

    def write_failure(self, code: int, step: int, message: str) -> None:
        """Set the status to failed, from any rank: rank 0 may be the one that is gone.

        Does nothing if the run has already ended or a new attempt has begun.
        """
        with contextlib.suppress(Unreadable):
            status = self.read_status()
            if status and (status["outcome"], status["attempt"]) != ("running", self.attempt):
                return
        self._write_status("failed", code, step, message)

    def _write_status(
        self, outcome: Outcome, code: int | None, step: int, message: str | None
    ) -> None:
        status = {
            "outcome": outcome,
            "code": None if code is None else int(code),
            "step": step,
            "attempt": self.attempt,
            "message": message,
            "gpu_hours": round(self.gpu_hours, 6),
            "time": _now(),
        }
        try:
            self._replace(self.status_path, status)
        except CannotSave:  # overwriting in place works on a full disk
            with writing(self.status_path), self.status_path.open("r+", encoding="utf-8") as file:
                file.write(as_text(status))
                file.truncate()

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, `attempt` first. `metrics` must contain `step`."""
        assert "step" in metrics, f"metrics without a step: {sorted(metrics)}"
        self._append(self.metrics_path, {"attempt": self.attempt, **metrics})

    def append_event(self, kind: str, **fields: Any) -> None:
        """Append a line to events.jsonl: time (UTC), attempt, kind and the fields."""
        event = {"time": _now(), "attempt": self.attempt, "kind": kind, **fields}
        self._append(self.events_path, event)

    def append_failure(self, rank: int, kind: str = "failed", **fields: Any) -> None:
        """Append an event from any rank without opening the folder: the rank that fails first is
        often not rank 0. `read_lines` skips lines garbled by several nodes writing at once (NFS).
        """
        line = {"time": _now(), "attempt": self.attempt, "kind": kind, "rank": rank, **fields}
        # A full disk, or a node that does not see the folder, must not hide the failure itself.
        with contextlib.suppress(OSError), self.events_path.open("a", encoding="utf-8") as file:
            file.write(as_line(line))

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        self._assert_open()
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(as_line(record))

    def _replace(self, path: Path, value: dict[str, Any]) -> None:
        """Write a JSON file atomically: readers see either the old content or the new."""
        text = as_text(value)
        temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
        with writing(path):
            try:
                with temporary.open("w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise

    def _assert_open(self) -> None:
        assert self._lock, f"{self.path} is not open for writing; only rank 0 opens it"

    # --- reading: by any process, at any time, even while the run writes ---

    def read_plan(self) -> dict[str, Any] | None:
        """Return plan.json, or None if it does not exist. Raises Unreadable if it is damaged."""
        return read_object(self.plan_path)

    def read_trackers(self) -> dict[str, str]:
        """Return the run's id for each tracker. Raises Unreadable if trackers.json is damaged."""
        return read_object(self.trackers_path) or {}

    def read_status(self) -> dict[str, Any] | None:
        """Return status.json, or None if no run was started. Raises Unreadable if it is damaged."""
        status = read_object(self.status_path)
        if status is not None and not all(is_count(status.get(n)) for n in ("attempt", "step")):
            raise Unreadable(f"{self.status_path} is damaged: it lacks an attempt or a step")
        return status

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return one record per logged step, in order; a repeated step replaces its earlier record.

        Raises Unreadable if metrics.jsonl is not a regular file.
        """
        by_step: dict[int, dict[str, Any]] = {}
        for line in read_lines(self.metrics_path, "step"):
            if not is_count(line["step"]):  # damaged, or not ours
                continue
            # A line with only an evaluation, made after a stop, adds to its step's line.
            earlier = {} if "loss" in line else by_step.get(line["step"], {})
            by_step[line["step"]] = {**earlier, **line}
        return [by_step[step] for step in sorted(by_step)]

    def read_events(self) -> list[dict[str, Any]]:
        """Return all events in order. Raises Unreadable if events.jsonl is not a regular file."""
        return list(read_lines(self.events_path, "kind"))

    def _last(self) -> tuple[int, int, float]:
        """Return attempt, step and GPU hours of status.json; from the lines if it is damaged."""
        try:
            status = self.read_status()
        except Unreadable as error:
            self.damaged.append(str(error))
            lines = [*read_lines(self.metrics_path, "step"), *self.read_events()]
            attempts = [line["attempt"] for line in lines if is_count(line.get("attempt"))]
            steps = [line["step"] for line in lines if is_count(line.get("step"))]
            return max(attempts, default=0), max(steps, default=0), 0.0
        return (status["attempt"], status["step"], _hours(status)) if status else (0, 0, 0.0)

    def _logged_hours(self) -> float:
        """Return the GPU hours of the newest metrics line: a killed run leaves an older status."""
        newest = self.metrics_path.read_bytes().rstrip().rpartition(b"\n")[2]
        try:
            return _hours(json.loads(newest))
        except (ValueError, RecursionError, AttributeError):  # damaged, or there is none
            return 0.0


def create_run_dir(model: str, json_name: str, now: datetime, root: str | Path = "runs") -> Path:
    """Create and return runs/MODEL-JSON-TIME, the folder of a run without run.dir; with a number,
    if it exists: jobs of an array start in the same second.
    """
    model = model.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^\w.-]", "_", f"{model}-{json_name}-{now:%Y%m%d-%H%M%S}")
    path, number = Path(root) / name, 1
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        number += 1
        path = Path(root) / f"{name}-{number}"


def _hours(record: dict[str, Any]) -> float:
    hours = record.get("gpu_hours")
    return float(hours) if isinstance(hours, int | float) else 0.0


def _now() -> str:
    """Return the current time as UTC ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
