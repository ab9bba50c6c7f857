"""Seconds of a run's life, by what they went into."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from harness.report.lines import number
from harness.report.recorded import Recorded, unix_time


class Part(NamedTuple):
    """A part of the time that all ranks spent."""

    name: str
    seconds: float
    colour: str


def spent(run: Recorded) -> list[Part]:
    """Return training, saving, starting, the rest of the work, and pauses between attempts.

    Nothing if the lines do not say when they were written.
    """
    attempts = _attempts(run)
    if not attempts:
        return []
    working = sum(last - begin for begin, _, last in attempts)
    starting = sum(first - begin for begin, first, _ in attempts)
    saving = sum(number(event.get("stall_s")) or 0.0 for event in run.of_kind("saved"))
    training = min(_training(run), working)
    rest = max(0.0, working - starting - saving - training)
    pauses = sum(max(0.0, later[0] - sooner[2]) for sooner, later in pairwise(attempts))
    parts = [
        Part("training steps", training, "var(--series-1)"),
        Part("evaluation, samples, export", rest, "var(--series-2)"),
        Part("saving", saving, "var(--series-3)"),
        Part("starting", starting, "var(--series-4)"),
        Part("not running, between attempts", pauses, "var(--faint)"),
    ]
    return [part for part in parts if part.seconds > 0]


def _training(run: Recorded) -> float:
    """Return the seconds in steps, also in those that were taken again."""
    timed = [
        (line, value)
        for line, is_even in zip(run.lines, run.metrics.is_even, strict=True)
        if is_even and (value := number(line.get("step_time_s"))) is not None
    ]
    if not timed:
        return 0.0
    mean = fmean(value for _, value in timed)
    if not run.metrics.is_whole:
        return mean * float(run.lines[-1]["step"])
    total, before = 0.0, None
    for line, seconds in timed:
        steps = 1 if before is None else line["step"] - before
        total += seconds * max(steps, 1)
        before = line["step"]
    return total + mean * run.metrics.repeated


def _attempts(run: Recorded) -> list[tuple[float, float, float]]:
    """Return begin, first logged line and last sign of each attempt, as seconds since 1970."""
    signs: dict[object, list[float]] = {}
    first_lines: dict[object, float] = {}
    for event in run.events:
        if (when := unix_time(event.get("time"))) is not None:
            signs.setdefault(event.get("attempt"), []).append(when)
    for line in run.lines:
        if (when := number(line.get("unix_time_s"))) is not None:
            signs.setdefault(line.get("attempt"), []).append(when)
            first_lines.setdefault(line.get("attempt"), when)
    if run.outcome != "running" and (end := unix_time(run.status.get("time"))) is not None:
        signs.setdefault(run.status.get("attempt"), []).append(end)
    if not first_lines:
        return []
    attempts = [(min(times), first_lines.get(key), max(times)) for key, times in signs.items()]
    return sorted((begin, begin if line is None else line, end) for begin, line, end in attempts)
