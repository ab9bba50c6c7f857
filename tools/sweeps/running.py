"""A trial that runs: its processes, watched from outside through its run folder."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from harness.errors import ConfigError
from harness.files.folder_lock import release, take_lock
from harness.files.records import Unreadable
from harness.runfolder import RunFolder
from tools.batch_job import PRUNED
from tools.sweeps.cost import Cost
from tools.sweeps.study import OpenTrial, Used

_LOG_LINES = 3
_LATEST = 2 / 3  # after so much of its run a trial may as well finish, and tell its final metric
_BUSY_S = 600.0  # how long a killed sweep's ranks may take over their last checkpoint


class Processes(Protocol):
    """Processes of a trial: ranks of this machine, or a job of Slurm."""

    def poll(self) -> int | None:
        """Return the exit code of all, None while they run."""
        ...

    def stop(self) -> None:
        """Ask for a checkpoint and an end."""
        ...

    def end(self) -> None:
        """End it at once."""
        ...

    def goes_on(self, code: int) -> bool:
        """Return True if what ended with `code` is started again by itself."""
        ...

    def last_lines(self) -> list[str]:
        """Return the end of the output."""
        ...


class Running:
    """A trial and its processes."""

    def __init__(
        self,
        trial: OpenTrial,
        cost: Cost,
        folder: RunFolder,
        metric: str,
        start: Callable[[], Processes],
    ) -> None:
        """Wait for what a killed sweep left, and start. Raises ConfigError if that stays."""
        self.trial, self.cost = trial, cost
        self.step = trial.used_before.steps
        self.value = math.inf
        """The metric when it was last evaluated."""
        self._folder, self._metric = folder, metric
        self._read, self._tokens = 0, trial.used_before.tokens
        self._began = time.monotonic()
        self._why_stopped, self._is_interrupted = "", False
        _wait_until_free(folder)
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / PRUNED).unlink(missing_ok=True)
        self._attempt_before = _status(folder).get("attempt", 0)
        self.processes = start()

    @property
    def number(self) -> int:
        """Its number."""
        return self.trial.number

    @property
    def total_steps(self) -> int:
        """Steps of its whole run."""
        return self.cost.steps

    @property
    def used(self) -> Used:
        """Steps, tokens and hours of the trial, earlier attempts included."""
        hours = self.trial.used_before.hours + (time.monotonic() - self._began) / 3600
        return Used(self.step, self._tokens, hours)

    def watch(self) -> bool:
        """Read what is new, stop a trial that the pruner gives up, record an end.

        Return True once the trial has ended, or cannot go on here.
        """
        code = self.processes.poll()  # first: what it wrote before its end is read now
        for line in self._new_lines():
            self._see(line)
        if code is None:
            return False
        self._record_end(code)
        return True

    def stop(self) -> None:
        """Interrupt the trial: it goes on when the sweep does."""
        self._is_interrupted = True
        self.processes.stop()

    def _see(self, line: dict[str, Any]) -> None:
        self.step, self._tokens = line["step"], line.get("tokens", self._tokens)
        if self._metric not in line or not self.step:
            return
        value = line[self._metric]
        self.value = float(value) if isinstance(value, int | float) else math.inf
        share = min(1.0, self.step / self.cost.steps)
        self.trial.note(self.used)  # for the budget of other nodes
        gives_up = self.trial.report(share, min(self.value, 1e300))
        if gives_up and share <= _LATEST and not self._why_stopped:
            self._why_stopped = f"stopped after {share:.0%} of its run"
            (self._folder.path / PRUNED).write_text(f"{self._why_stopped} by its sweep\n")
            self.processes.stop()

    def _record_end(self, code: int) -> None:
        status = _status(self._folder)
        if status.get("attempt") == self._attempt_before:  # it did not come to its run folder
            status = {}
        outcome, message = status.get("outcome"), status.get("message") or ""
        if outcome == "done":
            self.trial.done(self.value, self.used)
        elif outcome == "diverged":
            self.trial.done(math.inf, self.used, message)
        elif self._why_stopped:
            self.trial.pruned(self.used, self._why_stopped)
        elif self._is_interrupted or self.processes.goes_on(code):
            self.trial.note(self.used)
        else:
            text = message or " ".join(self.processes.last_lines())
            self.trial.failed(self.used, f"exit code {code}: {text}")

    def _new_lines(self) -> list[dict[str, Any]]:
        """Return the whole lines of metrics.jsonl that were not read yet."""
        path = self._folder.metrics_path
        try:
            if path.stat().st_size <= self._read:
                return []
            with path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = []
        for line in whole.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                lines.append(record)
        return lines


def _wait_until_free(folder: RunFolder) -> None:
    """Wait for the ranks of a sweep that was killed: they save and end. Raises ConfigError."""
    path, deadline = folder.path / "lock", time.monotonic() + _BUSY_S
    while path.exists():
        try:
            release(take_lock(path)[0])
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def _status(folder: RunFolder) -> dict[str, Any]:
    try:
        return folder.read_status() or {}
    except (OSError, Unreadable):
        return {}


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-_LOG_LINES:]
