"""A run's folder: its names and its records.  Nobody else writes plan, metrics, events or status.

    runs/NAME/
      plan.json          what was decided before the run
      metrics.jsonl      one line per logged step
      events.jsonl       one line per thing that should not pass unnoticed
      status.json        outcome, code, step, attempt, time
      checkpoints/step-00001000/
      export/            the Hugging Face model
      profile/           a closer look at a few steps
      heartbeats/        where each rank is; after a hang, where each was
      lock               who writes here now; empty when nobody does

Reading needs nothing but `RunFolder(path)`; writing needs `open()`, which only rank 0 calls
(`with contextlib.closing(folder)` releases it).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from harness.errors import ConfigError

Outcome = Literal["running", "done", "stopped", "failed", "diverged"]


class RunFolder:
    """One run on disk.  Constructing it touches nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.plan_path = self.path / "plan.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.status_path = self.path / "status.json"
        self.checkpoints_dir = self.path / "checkpoints"
        self.export_dir = self.path / "export"
        self.tokenizer_dir = self.path / "tokenizer"
        self.profile_dir = self.path / "profile"
        self.heartbeats_dir = self.path / "heartbeats"
        self.attempt = 0
        """Which attempt at the run this process is, from 1; 0 until `open`."""
        self._lock: IO[str] | None = None

    # --- writing: between open() and close(), by one process ---

    def open(self) -> str | None:
        """Make the folder if need be, take its lock, count the attempt, set the status to running.

        What a killed writer left half-written at the end of a file is cut off.  Returns who that
        writer was, so that the caller can record it, or None.

        Raises ConfigError when another process is writing here, and OSError where the folder
        cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock, stale = _take_lock(self.path / "lock")
        last = self.read_status() or {"attempt": 0, "step": 0}
        self.attempt = last["attempt"] + 1
        for path in (self.metrics_path, self.events_path):
            with path.open("a+b") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        shutil.rmtree(self.heartbeats_dir, ignore_errors=True)
        self.heartbeats_dir.mkdir()
        self.write_status("running", None, last["step"])
        return stale

    def close(self) -> None:
        """Release the lock.  Does nothing when the folder is not open."""
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Replace plan.json."""
        self._replace(self.plan_path, plan)

    def write_status(self, outcome: Outcome, code: int | None, step: int) -> None:
        """Replace status.json: how the run stands, its exit code if it ended, its last step."""
        status = {
            "outcome": outcome,
            "code": None if code is None else int(code),
            "step": step,
            "attempt": self.attempt,
            "time": _now(),
        }
        self._replace(self.status_path, status)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl; `attempt` comes first, and `step` must be in it."""
        assert "step" in metrics, f"metrics without a step: {sorted(metrics)}"
        self._append(self.metrics_path, {"attempt": self.attempt, **metrics})

    def append_event(self, kind: str, **fields: Any) -> None:
        """Add one line to events.jsonl: time (UTC), attempt, kind and the fields."""
        event = {"time": _now(), "attempt": self.attempt, "kind": kind, **fields}
        self._append(self.events_path, event)

    def append_failure(self, rank: int, kind: str = "failed", **fields: Any) -> None:
        """Add an event from any rank, also one that has not opened the folder: the rank that broke
        first often is not the one that writes. One short line, which the system appends whole.
        """
        line = {"time": _now(), "attempt": self.attempt, "kind": kind, "rank": rank, **fields}
        # A full disk, or a node that does not see the folder, must not hide what is being recorded.
        with contextlib.suppress(OSError), self.events_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        self._assert_open()
        line = json.dumps(_finite(record), allow_nan=False)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _replace(self, path: Path, value: dict[str, Any]) -> None:
        """Write a JSON file so that a reader or a crash meets the old one or the new one, whole."""
        self._assert_open()
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _assert_open(self) -> None:
        assert self._lock, f"{self.path} is not open for writing; only rank 0 opens it"

    # --- reading: by anybody, at any time, also while the run writes ---

    def read_plan(self) -> dict[str, Any] | None:
        """plan.json, or None where no run was planned."""
        return _read_json(self.plan_path)

    def read_status(self) -> dict[str, Any] | None:
        """status.json, or None where no run was started."""
        return _read_json(self.status_path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """What is known of each step, by step: a step done again replaces what it was."""
        by_step: dict[int, dict[str, Any]] = {}
        for line in _read_lines(self.metrics_path):
            # A line of an evaluation alone, made up for after a stop, adds to its step's.
            known = {} if "loss" in line else by_step.get(line["step"], {})
            by_step[line["step"]] = {**known, **line}
        return [by_step[step] for step in sorted(by_step)]

    def read_events(self) -> list[dict[str, Any]]:
        """All events, in the order in which they happened."""
        return list(_read_lines(self.events_path))


def _take_lock(path: Path) -> tuple[IO[str], str | None]:
    """The locked file, held until it is closed, and the dead owner that it was taken over from.

    The kernel's lock ends with its process, however that ends.  Between hosts it need not hold, so
    the file also names its owner: one on another host is believed to live, unless it was this very
    Slurm job before it was requeued.  The file is emptied at release, never deleted: two processes
    must not lock two files of one name.
    """
    file = path.open("a+", encoding="utf-8")
    job = os.environ.get("SLURM_JOB_ID")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = False
    except OSError as error:
        held = isinstance(error, BlockingIOError)  # others: a filesystem without such locks
    file.seek(0)
    owner = _owner(file.read())
    if owner and owner["host"] != socket.gethostname():
        held = held or owner["job"] is None or owner["job"] != job
    said = (
        "process {pid} on {host}, Slurm job {job}, since {since}".format(**owner) if owner else None
    )
    if held:
        file.close()
        raise ConfigError(
            f"run.dir = {path.parent} is being written by {said or 'another process'}: wait for "
            f"it, choose another run.dir, or, if it is dead, delete {path}"
        )
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "job": job, "since": _now()}
    file.truncate(0)
    file.write(json.dumps(owner))
    file.flush()
    return file, said


def _owner(text: str) -> dict[str, Any] | None:
    """Whom a lock file names; None for nobody, or a writer that died naming itself."""
    try:
        owner: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError:
        return None
    return owner


def create_run_dir(model: str, json_name: str, time: datetime, root: str | Path = "runs") -> Path:
    """Make and return the folder of a run that was given none: runs/MODEL-JSON-TIME.

    A number is added where it exists: jobs of an array start in the same second, and none may land
    in another's folder.
    """
    model = model.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^\w.-]", "_", f"{model}-{json_name}-{time:%Y%m%d-%H%M%S}")
    path = Path(root) / name
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = Path(root) / f"{name}-{number}"
        else:
            return path


def _now() -> str:
    """Now as UTC ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _finite(value: Any) -> Any:
    """Floats that JSON has no word for become "nan", "inf", "-inf": visible, and still JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return value


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The finished lines of a .jsonl file; what follows the last newline is still being written."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)
