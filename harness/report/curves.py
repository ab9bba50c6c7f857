"""A run's metrics as curves, and its events as marks on them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from harness.report.chart import Curve, Mark, Xs, reduced, smoothed
from harness.report.lines import number
from harness.report.palette import SERIES
from harness.report.recorded import Event, Recorded
from harness.report.words import short

SMOOTHED_FROM = 60
"""Lines from which on a noisy metric is drawn as its mean."""
MOST_POINTS = 900
"""Points of a curve where one run is shown; several runs share three times as many."""
MOST_MARKS = 120


def colour_of(place: int) -> str:
    """Return the CSS colour of the run or curve at a place; grey beyond the palette."""
    return f"var(--series-{place + 1})" if place < len(SERIES) else "var(--muted)"


def curve(
    run: Recorded,
    key: str,
    label: str,
    colour: str,
    *,
    scale: float = 1.0,
    smooth: bool = False,
    most: int = MOST_POINTS,
    value_of: Callable[[float], float] | None = None,
) -> Curve:
    """Return a metric of a run as a curve: its extremes, or its means if `smooth`."""
    is_even, places, values = run.metrics.is_even, list[int](), list[float]()
    for place, line in enumerate(run.lines):
        value = number(line.get(key))
        if value is not None and (is_even[place] or not smooth):
            places.append(place)
            values.append(value_of(value) if value_of else value * scale)
    if smooth and len(values) >= SMOOTHED_FROM:
        values = smoothed(values, max(5, len(values) // 40))
    kept = reduced(values, most)
    return _at(run, [places[at] for at in kept], [values[at] for at in kept], label, colour)


def _at(run: Recorded, places: list[int], values: list[float], label: str, colour: str) -> Curve:
    last = short(values[-1], 4) if values else ""
    return Curve(label, colour, _xs(run, places), values, last=last)


def _xs(run: Recorded, places: list[int]) -> Xs:
    """Return steps, tokens and seconds of the lines at some places."""
    return {
        "step": [float(run.lines[place]["step"]) for place in places],
        "tokens": [run.tokens_at(run.lines[place]) for place in places],
        "hours": [run.seconds[place] for place in places],
    }


def marks_of(run: Recorded, kinds: dict[str, tuple[str, str]]) -> Iterator[Mark]:
    """Yield the events of some kinds that have a step, at most so many, evenly chosen."""
    steps = [line["step"] for line in run.lines]
    events = [event for event in run.of_kind(*kinds) if step_of(event) is not None]
    every = max(1, -(-len(events) // MOST_MARKS))
    for event in events[::every] if steps else ():
        colour, label = kinds[event["kind"]]
        step = step_of(event) or 0
        place = min(bisect_left(steps, step), len(steps) - 1)
        x = {axis: xs[0] for axis, xs in _xs(run, [place]).items()} | {"step": float(step)}
        yield Mark(x, colour, f"{label}, step {step:,}")


def step_of(event: Event) -> int | None:
    """Return the step of an event; None if it has none."""
    step = number(event.get("from_step", event.get("step")))
    return None if step is None else int(step)
