"""A run as its folder records it, whatever state the folder is in."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.files.records import read_lines as read_records
from harness.report.lines import Line, Lines, number, read_lines
from harness.runfolder import RunFolder, saved_steps

Event = dict[str, Any]

MOST_EVENTS = 5_000
"""Newest events that are read."""
SILENT_S = 600.0
"""A run that has written nothing for this long, and for 20 logging intervals, may be dead."""


@dataclass
class RunRecord:
    """All records of one run."""

    path: Path
    name: str
    """The folder's name, or its path below the folder whose runs are listed."""
    plan: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    metrics: Lines = field(default_factory=Lines)
    problems: list[str] = field(default_factory=list)
    """Records that could not be read, each with the reason."""
    saved: list[int] = field(default_factory=list)
    """Steps of the checkpoints that are kept."""

    @property
    def lines(self) -> list[Line]:
        """Metrics lines, in the order of their steps."""
        return self.metrics.lines

    @property
    def trained(self) -> list[Line]:
        """Lines of training steps, without those of evaluations only."""
        return [line for line in self.lines if "loss" in line]

    @property
    def step(self) -> int:
        """The last step on record."""
        steps = [self.status.get("step"), *(line["step"] for line in self.lines[-1:])]
        return int(max((number(step) or 0 for step in steps), default=0))

    @property
    def total_steps(self) -> int | None:
        """Length of the run; None if plan.json does not say."""
        steps = number(self.planned("total_steps")) or number(self.planned("steps"))
        return int(steps) if steps else None

    @property
    def ranks_per_gpu(self) -> int:
        """The most ranks that shared a GPU."""
        return max(1, int(number(self.planned("world", "ranks_per_gpu")) or 1))

    @property
    def outcome(self) -> str:
        """running | done | stopped | failed | diverged, or unknown."""
        return str(self.status.get("outcome") or "unknown")

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Return a context that notes the problem of an unreadable record."""
        try:
            yield
        except ConfigError as error:
            self.problems.append(str(error))

    def planned(self, *keys: str) -> Any:
        """Return a value of plan.json by its keys; None if it is missing."""
        return dig(self.plan, *keys)

    def text(self, *keys: str) -> str:
        """Return a value of plan.json as text; "" if it is missing."""
        value = self.planned(*keys)
        return "" if value is None else str(value)

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds, in order."""
        return [event for event in self.events if event.get("kind") in kinds]

    def last_event(self, kind: str) -> Event | None:
        """Return the newest event of a kind."""
        return next(iter(self.of_kind(kind)[-1:]), None)

    def evaluations(self) -> list[tuple[int, float]]:
        """Return step and held-out loss of every evaluation."""
        return list(values_of(self.lines, "eval_loss"))

    @property
    def before(self) -> float | None:
        """Held-out loss before the first step; None if it was not measured."""
        return next((loss for step, loss in self.evaluations()[:1] if step == 0), None)

    def lowest(self) -> tuple[int, float] | None:
        """Return step and value of the lowest held-out loss after a step."""
        return min(self._trained(), key=lambda pair: pair[1], default=None)

    def best(self) -> tuple[int, float] | None:
        """Return step and held-out loss of the best trained weights that can be used: those of a
        kept checkpoint, or the last ones, which are exported or, during the run, still trained.
        """
        trained = self._trained()
        kept = [pair for pair in trained if pair[0] in self.saved]
        if not kept or self.outcome == "running":
            kept += trained[-1:]
        return min(kept, key=lambda pair: pair[1], default=None)

    def has_improved(self) -> bool:
        """Return False if the best weights are no better than those before the first step."""
        best = self.best()
        return best is None or self.before is None or best[1] < self.before

    def _trained(self) -> list[tuple[int, float]]:
        return [(step, loss) for step, loss in self.evaluations() if step > 0]

    @property
    def gpu_hours(self) -> float | None:
        """GPU hours of all attempts so far; None if they were not recorded."""
        records = (self.status, *self.lines[-1:])
        return max(
            (h for r in records if (h := number(r.get("gpu_hours"))) is not None), default=None
        )

    def even_values(self, key: str) -> Iterator[tuple[int, float]]:
        """Yield step and value of a key on evenly chosen lines, which may enter a mean."""
        even = zip(self.lines, self.metrics.is_even, strict=True)
        return values_of([line for line, is_even in even if is_even], key)

    @property
    def held_out_set(self) -> str:
        """Identity of what the held-out loss is measured on; "" if unknown. Losses on different
        sets, or by different tokenizers, cannot be compared.
        """
        return self.text("held_out_set")

    @cached_property
    def seconds(self) -> list[float]:
        """For each line: seconds of work since the run began, without pauses between attempts."""
        seconds, total = list[float](), 0.0
        previous: Line = {}
        for line in self.lines:
            same = line.get("attempt") == previous.get("attempt")
            now, then = number(line.get("unix_time_s")), number(previous.get("unix_time_s"))
            steps = line["step"] - previous.get("step", 0)
            if now is not None and then is not None and same:
                total += max(0.0, now - then)
            else:
                total += (number(line.get("step_time_s")) or 0.0) * max(steps, 0)
            seconds.append(total)
            previous = line
        return seconds

    def tokens_at(self, line: Line) -> float:
        """Return the tokens read up to a line."""
        return number(line.get("tokens")) or 0.0

    @property
    def last_sign(self) -> float | None:
        """Unix time of the newest record."""
        times = [number(line.get("unix_time_s")) for line in self.lines[-1:]]
        times += [unix_time(event.get("time")) for event in [*self.events[-1:], self.status]]
        return max((when for when in times if when is not None), default=None)

    def is_silent(self, now: float | None = None) -> bool:
        """Return True if the run's status is running, but it has written nothing for too long."""
        if self.outcome != "running" or self.last_sign is None:
            return False
        step_s = max(
            (number(line.get("step_time_s")) or 0.0 for line in self.lines[-5:]), default=0
        )
        logged = number(self.planned("run", "log", "every")) or 1
        return (now or time.time()) - self.last_sign > max(SILENT_S, 20 * step_s * logged)


def read(path: Path, name: str = "") -> RunRecord:
    """Read a run folder. Never raises because of the folder's content: see `problems`."""
    folder, run = RunFolder(path), RunRecord(path, name or path.name)
    with contextlib.suppress(OSError):
        run.saved = saved_steps(str(path))
    with run.noting():
        run.plan = folder.read_plan() or {}
        if not run.plan:
            run.problems.append("plan.json does not exist: the run did not start")
    with run.noting():
        run.status = folder.read_status() or {}
    with run.noting():
        run.events = list(deque(read_records(folder.events_path, "kind"), MOST_EVENTS))
    run.metrics = read_lines(folder.metrics_path)
    if run.metrics.problem:
        run.problems.append(run.metrics.problem)
    if run.metrics.damaged:
        run.problems.append(f"metrics.jsonl: {run.metrics.damaged} damaged lines were left out")
    return run


def is_run(path: Path) -> bool:
    """Return True for a folder with a run's records."""
    return any((path / name).is_file() for name in ("plan.json", "status.json", "metrics.jsonl"))


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders at or below a folder, in the order of their names."""
    if is_run(folder):
        return [folder]
    try:
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:  # not ours to read
        return []
    return [run for path in below for run in runs_in(path)]


def values_of(lines: list[Line], key: str) -> Iterator[tuple[int, float]]:
    """Yield step and value of every line that has a finite number under a key."""
    for line in lines:
        if (value := number(line.get(key))) is not None:
            yield line["step"], value


def dig(value: Any, *keys: str) -> Any:
    """Return a value in nested objects; None if it is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def unix_time(text: object) -> float | None:
    """Return the time of a record as seconds since 1970; None if it is not a time."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None
