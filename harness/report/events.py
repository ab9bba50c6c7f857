"""Events of a run as people read them."""

from __future__ import annotations

import json

from harness.report.charts import MARKS
from harness.report.curves import step_of
from harness.report.lines import number
from harness.report.recorded import Event, Recorded, unix_time
from harness.report.words import count, cut, duration, escaped, gib, moment, short

MOST_EVENTS = 300


def events_card(run: Recorded) -> str:
    """Return the events of a run, the newest first; "" of one without."""
    if not run.events:
        return ""
    shown = run.events[-MOST_EVENTS:]
    rows = "".join(_row(event) for event in reversed(shown))
    left = f" (newest {len(shown)} of {len(run.events):,})" if len(shown) < len(run.events) else ""
    return (
        f"<section class=card><h2>Events{left}</h2><div class=scroll><table class=events>"
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
