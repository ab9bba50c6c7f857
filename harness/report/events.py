"""Events of a run in readable form, and how its time was spent."""

import json
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from harness.report.charts import MARKS, step_of
from harness.report.formatting import count, cut, duration, escaped, gib, moment, short
from harness.report.lines import number
from harness.report.run_record import Event, RunRecord, unix_time

LEAST_GAIN = 0.01
"""Fraction of the first held-out loss by which the last must be lower."""


def no_better(first: float, last: float) -> str | None:
    """Return the problem of a run whose held-out loss did not improve, or hardly; None if it did.

    `first` and `last` are in nats per token.
    """
    if last < first * (1 - LEAST_GAIN):
        return None
    how = "hardly improved" if last < first else "did not improve"
    why = "optim.lr is too low, or its steps are too few (train.epochs, train.global_batch)"
    if last > first:
        why = "optim.lr is too high, or its data differs from what is held out"
    losses = f"from {first:.3f} before training to {last:.3f}"
    return f"the held-out loss {how} ({losses}): {why}"


class Part(NamedTuple):
    """A part of a run's wall-clock time."""

    name: str
    seconds: float
    colour: str


def spent(run: RunRecord) -> list[Part]:
    """Return the time of a run by part: training, the rest of the work, saving, starting, and
    pauses between attempts.

    Empty if the lines have no times.
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


def _training(run: RunRecord) -> float:
    """Return the seconds spent in steps, including repeated ones."""
    timed = [*run.even_values("step_time_s")]
    if not timed:
        return 0.0
    mean = fmean(value for _, value in timed)
    if not run.metrics.is_whole:
        return mean * float(run.lines[-1]["step"] + run.metrics.repeated)
    total, before = 0.0, None
    for step, seconds in timed:
        total += seconds * (1 if before is None else max(step - before, 1))
        before = step
    return total + mean * run.metrics.repeated


def _attempts(run: RunRecord) -> list[tuple[float, float, float]]:
    """Return the start, first logged line and last sign of each attempt, as seconds since 1970."""
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


MOST_EVENTS = 300


def events_card(run: RunRecord) -> str:
    """Return the events of a run, the newest first; "" if it has none."""
    if not run.events:
        return ""
    shown = run.events[-MOST_EVENTS:]
    rows = "".join(_row(event) for event in reversed(shown))
    left = f" (newest {len(shown)} of {len(run.events):,})" if len(shown) < len(run.events) else ""
    return (
        f"<section class=card><h2>Events{left}</h2><div class=capped><table class=events>"
        f"<tr><th>time<th>step<th>event<th></tr>{rows}</table></div></section>"
    )


def _row(event: Event) -> str:
    kind = str(event.get("kind"))
    colour = MARKS.get(kind, ("var(--faint)", ""))[0]
    step = step_of(event)
    return (
        f"<tr><td>{moment(unix_time(event.get('time')))}<td>{'' if step is None else count(step)}"
        f'<td><i style="--c:{colour}"></i>{escaped(kind.replace("_", " "))}'
        f"<td>{escaped(text_of(event))}</tr>"
    )


def text_of(event: Event) -> str:
    """Return an event's sentence, or its values."""
    if isinstance(message := event.get("message"), str):
        return cut(message, 600)
    if event.get("kind") == "saved" and (seconds := number(event.get("seconds"))) is not None:
        size, stall = gib(number(event.get("bytes"))), duration(number(event.get("stall_s")))
        return f"{size} in {duration(seconds)}, {stall} of them waited for: {event.get('path')}"
    if event.get("kind") == "engine" and isinstance(ranks := event.get("ranks"), list):
        return f"{len(ranks)} ranks, the first runs {cut(_shown(ranks[:1]), 300)}"
    if event.get("kind") == "memory":
        return "measured and predicted: see above"
    left = {k: v for k, v in event.items() if k not in ("time", "attempt", "kind", "step")}
    return cut(", ".join(f"{key} {cut(_shown(value), 120)}" for key, value in left.items()), 400)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return short(value, 4)
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
