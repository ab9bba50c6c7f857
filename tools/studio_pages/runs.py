"""The page of runs: all of them, one that may be running, another beside it, events and logs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from urllib.parse import quote

from harness.report.compare import differences
from harness.report.events import text_of
from harness.report.recorded import unix_time
from harness.report.words import moment
from tools.studio_app.charts import Axis, Line, lines
from tools.studio_app.page import (
    Chart,
    Choice,
    Code,
    Figure,
    Links,
    Note,
    Number,
    Numbers,
    Page,
    Table,
    Values,
    Verdict,
)
from tools.studio_app.runs import Run, logs, names, read_run, thinned

_NEWEST, _NONE = "(the newest)", "(none)"
_X = {"steps": "step", "tokens": "tokens", "hours": "hours"}
_MOST_LISTED, _MOST_EVENTS = 60, 80
_WINDOW = 40  # logged steps
_COLOURS: dict[str, Verdict] = {
    "done": "good",
    "running": "good",
    "stopped": "warning",
    "failed": "bad",
    "diverged": "bad",
}
_MAIN, _EVERY = "the main ones", "all"
_CHARTS = (
    ("Loss, nats per token", ("loss", "eval_loss"), "value"),
    ("Gradient norm before clipping", ("grad_norm",), "log"),
    ("Tokens per second, all ranks", ("tokens_per_s",), "value"),
    ("Learning rate", ("learning_rate",), "value"),
    ("Memory held at most, GiB", ("peak_allocated_gib",), "value"),
    ("Weights: norm", ("param_norm",), "value"),
    ("Update over weight", ("update_ratio",), "log"),
)


def figures(values: Values) -> list[Figure]:
    """Return the list of runs, and a dashboard of the chosen one."""
    listed = names()
    if not listed:
        return [Note("There are no runs yet: train.py writes them into the folder of --runs.")]
    chosen = values["run"] if values["run"] in listed else listed[0]
    run = read_run(chosen)
    assert run is not None, "it is listed"
    other = read_run(values["beside"]) if values["beside"] in listed else None
    shown = [run] if other is None or other.name == run.name else [run, other]
    return [
        Numbers([*_state(run), *targets(run)]),
        *(Note(f"{run.name}: {problem}", "warning") for problem in run.records.problems),
        Links(
            f"{run.name}, whole",
            (("The report of this run: memory, time, samples, plan, advice", _report(run.name)),),
        ),
        *_charts(shown, values["x"])[: 3 if values["curves"] == _MAIN else None],
        *([_differences(shown)] if len(shown) > 1 else []),
        _events(run),
        *(Code(f"{run.name}/{name}, its end", text) for name, text in logs(run.name)),
        _list(listed[:_MOST_LISTED]),
    ]


def _state(run: Run) -> list[Number]:
    records = run.records
    outcome, step, steps = records.outcome, records.step, records.total_steps
    note = str(records.status.get("message") or "")[:200]
    if records.is_silent():
        note = f"but nothing was written for {run.age_s / 60:,.0f} minutes"
    of = f"of {steps:,}" if steps else "logged"
    rest = run.last("step_time_s")
    left = ""
    if outcome == "running" and steps and rest:
        left = f"{rest * (steps - step) / 60:,.1f} minutes left"
    speed, mfu, loss = run.last("tokens_per_s"), run.last("mfu"), run.last("loss")
    held_out = run.last("eval_loss")
    perplexity = "" if held_out is None else f"perplexity {math.exp(min(held_out, 50)):,.1f}"
    return [
        Number("Run", outcome, note or run.name, _COLOURS.get(outcome)),
        Number("Step", f"{step:,}", f"{of} {left}".strip()),
        Number("Loss", _text(loss), "nats per token, the last step"),
        Number("Held-out loss", _text(held_out), perplexity),
        Number("Tokens per second", "" if speed is None else f"{speed:,.0f}", "all ranks"),
        Number("MFU", "not known" if mfu is None else f"{mfu:.1%}"),
    ]


def targets(run: Run) -> list[Number]:
    """Return whether the loss falls, the norm is stable and attention is neither sharp nor flat."""
    return [
        _falling([value for _, value in run.series("loss")]),
        _stable([value for _, value in run.series("grad_norm")]),
        _moderate(run),
    ]


def _falling(losses: Sequence[float]) -> Number:
    label = "Target: loss falls"
    if len(losses) < 4:
        return Number(label, "too early", "fewer than 4 logged steps")
    half = min(len(losses) // 2, _WINDOW)
    before, now = statistics.mean(losses[-2 * half : -half]), statistics.mean(losses[-half:])
    note = f"{before:.3f}, then {now:.3f}: means of {half} logged steps each"
    return Number(
        label, "yes" if now < before else "no", note, "good" if now < before else "warning"
    )


def _stable(norms: Sequence[float]) -> Number:
    label, recent = "Target: norm stable", norms[-_WINDOW:]
    if len(recent) < 4:
        return Number(label, "too early", "fewer than 4 logged steps")
    ratio = max(recent) / max(statistics.median(recent), 1e-30)
    verdict: Verdict = "good" if ratio < 3 else "warning" if ratio < 10 else "bad"
    note = f"largest of {len(recent)} is {ratio:.1f} x their median"
    return Number(label, "yes" if ratio < 3 else "no", note, verdict)


def _moderate(run: Run) -> Number:
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
        return Number(label, "not measured", "attention entropy is not in this run's metrics")
    most = math.log(max(length, 2))
    shares = {key.rpartition("/")[2]: value / most for key, value in values.items()}
    low, high = min(shares, key=lambda key: shares[key]), max(shares, key=lambda key: shares[key])
    good = shares[low] > 0.05 and shares[high] < 0.95
    note = f"{shares[low]:.0%} (layer {low}) to {shares[high]:.0%} (layer {high}) of uniform"
    return Number(label, "yes" if good else "no", note, "good" if good else "warning")


def _charts(runs: list[Run], x: str) -> list[Chart]:
    charts = []
    for title, keys, scale in _CHARTS:
        curves = [
            Line(f"{run.name}: {key}", thinned(points), dashed=key == "eval_loss")
            for run in runs
            for key in keys
            if (points := _positive(run.series(key, _X[x]), scale))
        ]
        limits = {}
        if title.startswith("Memory") and curves:
            predicted = runs[0].records.planned("estimate", "peak_allocated_gib")
            limits = {"predicted": float(predicted)} if isinstance(predicted, int | float) else {}
        if curves:
            axis = Axis("", scale)  # type: ignore[arg-type]
            charts.append(Chart(title, lines(curves, Axis(x), axis, limits=limits), 280))
    return charts


def _positive(points: list[tuple[float, float]], scale: str) -> list[tuple[float, float]]:
    return [point for point in points if point[1] > 0] if scale == "log" else points


def _events(run: Run) -> Table:
    rows = []
    for event in reversed(run.records.events[-_MOST_EVENTS:]):
        when = moment(unix_time(event.get("time")))
        cells = (when, event.get("step", ""), event["kind"], text_of(event))
        rows.append(tuple(str(cell) for cell in cells))
    title = f"Events of {run.name}, the newest first ({len(run.records.events):,} in all)"
    links = [f"/problems?search={quote(row[2])}" for row in rows]
    kinds_first = [(kind, when, step, text) for when, step, kind, text in rows]
    return Table(title, ("kind", "time", "step", "what"), kinds_first, links)


def _differences(runs: list[Run]) -> Table:
    """The settings that differ."""
    rows = [(key, *values) for key, values in differences([run.records for run in runs])]
    rows = rows or [("nothing", *("" for _ in runs))]
    return Table("What differs between the two", ("key", *(run.name for run in runs)), rows)


def _list(listed: list[str]) -> Table:
    rows, links = [], []
    for name in listed:
        run = read_run(name)
        if run is None:  # removed in the meantime
            continue
        records, model = run.records, run.records.text("run", "model", "name")
        rows.append(
            (
                name,
                records.outcome,
                f"{records.step:,}"
                + (f" of {records.total_steps:,}" if records.total_steps else ""),
                _text(run.last("loss")),
                _text(run.last("eval_loss")),
                model[:40],
                f"{run.age_s / 60:,.0f} min ago",
            )
        )
        links.append(f"/runs?run={quote(name, safe='')}")
    head = ("run", "outcome", "step", "loss", "held-out", "model", "written")
    return Table("All runs, the newest first", head, rows, links)


def _text(value: float | None) -> str:
    return "none yet" if value is None else f"{value:.4f}"


def _report(name: str) -> str:
    return f"/report?run={quote(name, safe='')}"


def _runs() -> list[str]:
    return [_NEWEST, *names()]


def _others() -> list[str]:
    return [_NONE, *names()]


PAGE = Page(
    slug="runs",
    title="Runs",
    controls=(
        Choice("run", "Run", _runs, _NEWEST),
        Choice("beside", "Beside it", _others, _NONE),
        Choice("x", "Against", tuple(_X), "steps"),
        Choice("curves", "Curves", (_MAIN, _EVERY), _MAIN),
    ),
    figures=figures,
    computed_by=(
        "harness.report.recorded.read",
        "tools.studio_app.runs.read_run",
        "tools.studio_pages.runs.targets",
    ),
    formula="Loss falls: the mean of the last logged steps is below that of as many before them. "
    "Norm stable: the largest of the last 40 is below 3 x their median. Entropy moderate: every "
    "layer's attention entropy is between 5 % and 95 % of ln(sequence length), that of uniform "
    "attention; far below it training is unstable.",
    sources=(
        ("Entropy collapse, Zhai et al., arXiv 2303.06296", "https://arxiv.org/abs/2303.06296"),
        ("PaLM, arXiv 2204.02311, section 5.1 (spikes)", "https://arxiv.org/abs/2204.02311"),
    ),
    every_s=5,
)
