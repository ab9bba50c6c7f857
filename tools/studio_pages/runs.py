"""Runs: a list of all, and one that may be running, with its targets, events and logs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from harness.report.chart import AXES
from harness.report.charts import charts
from harness.report.events import text_of
from harness.report.formatting import moment
from harness.report.run_record import unix_time
from tools.studio_app.figures import Code, Figure, Note, Table, Verdict, numbers
from tools.studio_app.page import Choice, Page, Values
from tools.studio_app.runs import Run, logs, names, read_run

_NEWEST = "(the newest)"
_MOST_LISTED, _MOST_EVENTS = 60, 80
_WINDOW = 40  # logged steps
_COLOURS: dict[str, Verdict] = {
    "done": "good",
    "running": "good",
    "stopped": "warning",
    "failed": "bad",
    "diverged": "bad",
}
_CHARTS = ("loss", "held-out", "grad-norm", "tokens-per-s")


def figures(values: Values) -> list[Figure]:
    """Return the list of runs, and a dashboard of the chosen one."""
    listed = names()
    if not listed:
        return [Note("There are no runs yet: train.py writes them into the folder of --runs.")]
    run = read_run(values["run"] if values["run"] in listed else listed[0])
    assert run is not None, "it is listed"
    return [
        numbers(*_state(run), *targets(run)),
        *(Note(f"{run.name}: {problem}", "warning") for problem in run.records.problems),
        Table(
            *(f"{run.name}, whole", "", [("The report: memory, time, samples, plan, advice",)]),
            [f"/report?run={quote(run.name, safe='')}"],
        ),
        *(
            replace(chart, axes={"step": AXES["step"]}, is_wide=False, height=260)
            for chart in charts([run.records])
            if chart.name in _CHARTS and any(curve.y for curve in chart.curves)
        ),
        _events(run),
        *(Code(f"{run.name}/{name}, its end", text) for name, text in logs(run.name)),
        _list(listed[:_MOST_LISTED]),
    ]


def _state(run: Run) -> list[tuple[Any, ...]]:
    records = run.records
    outcome, step, steps = records.outcome, records.step, records.total_steps
    note = str(records.status.get("message") or "")[:200]
    if records.is_silent():
        note = f"but it has written nothing for {run.age_s / 60:,.0f} minutes"
    progress = f"of {steps:,}" if steps else "logged"
    seconds = run.last("step_time_s")
    if outcome == "running" and steps and seconds:
        progress += f" {seconds * (steps - step) / 60:,.1f} minutes left"
    speed, mfu, held_out = run.last("tokens_per_s"), run.last("mfu"), run.last("eval_loss")
    perplexity = "" if held_out is None else f"perplexity {math.exp(min(held_out, 50)):,.1f}"
    return [
        ("Run", outcome, note or run.name, _COLOURS.get(outcome)),
        ("Step", f"{step:,}", progress),
        ("Loss", _text(run.last("loss")), "nats per token, the last step"),
        ("Held-out loss", _text(held_out), perplexity),
        ("Tokens per second", "" if speed is None else f"{speed:,.0f}", "all ranks"),
        ("MFU", "not known" if mfu is None else f"{mfu:.1%}"),
    ]


def targets(run: Run) -> list[tuple[Any, ...]]:
    """Return three targets: the loss falls, the norm is stable, attention is not sharp or flat."""
    return [_falling(run.values("loss")), _stable(run.values("grad_norm")), _moderate(run)]


def _falling(losses: Sequence[float]) -> tuple[Any, ...]:
    label = "Target: loss falls"
    if len(losses) < 4:
        return (label, "too early", "fewer than 4 logged steps")
    half = min(len(losses) // 2, _WINDOW)
    before, now = statistics.mean(losses[-2 * half : -half]), statistics.mean(losses[-half:])
    note = f"{before:.3f}, then {now:.3f}: means of {half} logged steps each"
    return (label, "yes" if now < before else "no", note, "good" if now < before else "warning")


def _stable(norms: Sequence[float]) -> tuple[Any, ...]:
    label, recent = "Target: norm stable", norms[-_WINDOW:]
    if len(recent) < 4:
        return (label, "too early", "fewer than 4 logged steps")
    ratio = max(recent) / max(statistics.median(recent), 1e-30)
    verdict: Verdict = "good" if ratio < 3 else "warning" if ratio < 10 else "bad"
    note = f"largest of {len(recent)} is {ratio:.1f} x their median"
    return (label, "yes" if ratio < 3 else "no", note, verdict)


def _moderate(run: Run) -> tuple[Any, ...]:
    label = "Target: entropy moderate"
    keys = {
        key
        for line in run.records.lines[-200:]
        for key in line
        if key.startswith("attention_entropy/")
    }
    last = {key: run.last(key) for key in keys}
    values = {key: value for key, value in last.items() if value is not None}
    length = run.records.planned("run", "data", "seq_len")
    if not values or not isinstance(length, int):
        return (label, "not measured", "attention entropy is not in this run's metrics")
    most = math.log(max(length, 2))
    shares = {key.rpartition("/")[2]: value / most for key, value in values.items()}
    low, high = min(shares, key=lambda key: shares[key]), max(shares, key=lambda key: shares[key])
    good = shares[low] > 0.05 and shares[high] < 0.95
    note = f"{shares[low]:.0%} (layer {low}) to {shares[high]:.0%} (layer {high}) of uniform"
    return (label, "yes" if good else "no", note, "good" if good else "warning")


def _events(run: Run) -> Table:
    rows = []
    for event in reversed(run.records.events[-_MOST_EVENTS:]):
        when = moment(unix_time(event.get("time")))
        rows.append((str(event["kind"]), when, str(event.get("step", "")), text_of(event)))
    title = f"Events of {run.name}, the newest first ({len(run.records.events):,} in all)"
    links = [f"/problems?search={quote(kind)}" for kind, *_ in rows]
    return Table(title, "kind|time|step|what", rows, links)


def _list(listed: list[str]) -> Table:
    runs = [run for name in listed if (run := read_run(name))]  # some may be removed meanwhile
    rows, links = [], [f"/runs?run={quote(run.name, safe='')}" for run in runs]
    for run in runs:
        records, losses = run.records, (_text(run.last(key)) for key in ("loss", "eval_loss"))
        step = f"{records.step:,}"
        step += f" of {records.total_steps:,}" if records.total_steps else ""
        model, age = records.text("run", "model", "name")[:40], f"{run.age_s / 60:,.0f} min ago"
        rows.append((run.name, records.outcome, step, *losses, model, age))
    head = "run|outcome|step|loss|held-out|model|written"
    return Table("All runs, the newest first", head, rows, links)


def _text(value: float | None) -> str:
    return "none yet" if value is None else f"{value:.4f}"


PAGE = Page(
    "runs", (Choice("run", "Run", lambda: [_NEWEST, *names()], _NEWEST),), figures, every_s=5
)
