"""Charts of a run, or of several runs overlaid, from their metrics and events."""

import math
import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.report.chart import Chart, Curve, Mark, Xs, colour_of
from harness.report.formatting import short
from harness.report.lines import number
from harness.report.palette import COMPONENTS
from harness.report.profiles import profiles
from harness.report.run_record import Event, RunRecord

_TABLES = tomllib.loads(Path(__file__).with_name("charts.toml").read_text(encoding="utf-8"))


def group_of(component: str) -> str:
    """Return the group of a component: "buffers" for whatever only moves or adds up data."""
    fitting = (
        group
        for group, prefixes in _TABLES["prefixes"].items()
        if component.startswith(tuple(prefixes))
    )
    return next(fitting, "buffers")


def grouped(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the size of every group, in stacking order."""
    sums = dict.fromkeys(COMPONENTS, 0.0)
    for component, size in sizes.items():
        sums[group_of(component)] += size
    return sums


SMOOTHED_FROM = 60
"""Number of lines from which a noisy metric is drawn as its mean."""
MOST_POINTS = 900
"""Maximum points of a curve if one run is shown; several runs share three times as many."""
MOST_MARKS = 120


def curve(
    run: RunRecord,
    key: str,
    label: str,
    colour: str,
    *,
    scale: float = 1.0,
    smooth: bool = False,
    most: int = MOST_POINTS,
) -> Curve:
    """Return a metric of a run as a curve: its extremes, or its means if `smooth`."""
    is_even, places, values = run.metrics.is_even, list[int](), list[float]()
    for place, line in enumerate(run.lines):
        value = number(line.get(key))
        if value is not None and (is_even[place] or not smooth):
            places.append(place)
            values.append(value * scale)
    if smooth and len(values) >= SMOOTHED_FROM:
        values = smoothed(values, max(5, len(values) // 40))
    kept = reduced(values, most)
    xs, values = _xs(run, [places[at] for at in kept]), [values[at] for at in kept]
    return Curve(label, colour, xs, values, last=short(values[-1], 4) if values else "")


def _xs(run: RunRecord, places: list[int]) -> Xs:
    """Return steps, tokens and seconds of the lines at some places."""
    return {
        "step": [float(run.lines[place]["step"]) for place in places],
        "tokens": [run.tokens_at(run.lines[place]) for place in places],
        "hours": [run.seconds[place] for place in places],
    }


def marks_of(run: RunRecord, kinds: dict[str, tuple[str, str]]) -> Iterator[Mark]:
    """Yield the events of these kinds that have a step: at most MOST_MARKS, evenly chosen."""
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


MARKS: dict[str, tuple[str, str]] = {kind: tuple(mark) for kind, mark in _TABLES["marks"].items()}
"""Kinds of events that are marked in every chart over the run; saves only in the first."""
SAVED = {"saved": ("var(--faint)", "checkpoint")}


@dataclass(frozen=True)
class _Kind:
    """How a metric is drawn over the run."""

    key: str
    title: str
    unit: str
    is_noisy: bool = False
    from_zero: bool = False
    scale: float = 1.0
    constant_too: bool = False
    """True if it is drawn even if it never changes."""
    note: str = ""


_KINDS = [_Kind(**metric) for metric in _TABLES["metrics"]]


def charts(runs: list[RunRecord]) -> list[Chart]:
    """Return the charts for which there are values, most important first."""
    if len(runs) == 1:
        (run,) = runs
        marks = list(marks_of(run, MARKS))
        others = [replace(chart, marks=marks) for chart in (_perplexity(runs), *_metrics(runs))]
        return [_loss(run), *others, *profiles(run)]
    losses, held_out = _several(runs, "loss", smooth=True), _dotted(_several(runs, "eval_loss"))
    unit = _unit(runs)
    return [
        Chart("loss", "Training loss", f"{unit}, smoothed", losses, is_wide=True, has_legend=False),
        Chart("held-out", "Held-out loss", unit, held_out, is_wide=True, has_legend=False),
        _perplexity(runs),
        *_metrics(runs),
        *_sources(runs),
    ]


def _loss(run: RunRecord) -> Chart:
    """Return the first chart: training and held-out loss, sources, baselines, events."""
    raw = curve(run, "loss", "every logged step", colour_of(0))
    train = [raw]
    if len(raw.y) >= SMOOTHED_FROM:
        mean = curve(run, "loss", "training", colour_of(0), smooth=True)
        train = [replace(raw, style="faint"), mean]
    held_out = curve(run, "eval_loss", "held-out", colour_of(1))
    sets = [key for key in _keys(run, "eval_loss/") if len(_keys(run, "eval_loss/")) > 1]
    sources = _keys(run, "loss/")
    extra = [*((key, False) for key in sets), *((key, True) for key in sources)]
    names = [key.replace("eval_loss/", "held-out ").replace("loss/", "") for key, _ in extra]
    others = [
        replace(curve(run, key, name, colour_of(2 + place), smooth=smooth), style="dashed")
        for place, ((key, smooth), name) in enumerate(zip(extra, names, strict=True))
    ]
    train[-1] = replace(train[-1], label="training")
    event = run.last_event("baselines") or {}
    limits = [
        (f"{name} model {nats:.2f}", nats)
        for name in ("unigram", "bigram")
        if (nats := number(event.get(f"{name}_nats"))) is not None
    ]
    return Chart(
        "loss",
        "Loss",
        _unit([run]),
        [*train, replace(held_out, style="dots"), *others],
        limits=limits,
        marks=[*marks_of(run, SAVED), *marks_of(run, MARKS)],
        is_wide=True,
        note=_note(run),
    )


def _unit(runs: Sequence[RunRecord]) -> str:
    """Return the unit of losses; pairs have no nats per token."""
    return "mean over pairs" if any(map(compares_pairs, runs)) else "nats per token"


def compares_pairs(run: RunRecord) -> bool:
    """Return True for a run on preference pairs, whose losses are no nats per token."""
    return any(key.endswith("preference_accuracy") for line in run.lines[:1] for key in line)


def _note(run: RunRecord) -> str:
    ends = "" if run.metrics.is_whole else "The run is long: the extremes of each range are drawn. "
    nan = sum(line.get("loss") in ("nan", "inf", "-inf") for line in run.lines)
    lost = f"{nan} drawn steps have a non-finite loss and appear as gaps." if nan else ""
    return (ends + lost).strip()


def _keys(run: RunRecord, prefix: str) -> list[str]:
    """Return the metrics with a prefix, in the order of their first line; at most six."""
    keys = {key: None for line in run.lines for key in line if key.startswith(prefix)}
    return list(keys)[:6]


def _several(
    runs: list[RunRecord], key: str, *, scale: float = 1.0, smooth: bool = False
) -> list[Curve]:
    """Return one curve for each run."""
    if not runs:
        return []
    most, smooth = min(MOST_POINTS, 3 * MOST_POINTS // len(runs)), smooth and len(runs) > 1
    curves = [
        curve(
            *(run, key, run.name if len(runs) > 1 else "", colour_of(place)),
            scale=scale,
            smooth=smooth,
            most=most,
        )
        for place, run in enumerate(runs)
    ]
    return [replace(each, run=str(place)) for place, each in enumerate(curves)]


def _dotted(curves: list[Curve]) -> list[Curve]:
    return [replace(each, style="dots") for each in curves]


def _perplexity(runs: list[RunRecord]) -> Chart:
    """Return exp of the held-out loss, without the first evaluation: that of untrained weights."""
    curves = []
    for each in _several([run for run in runs if not compares_pairs(run)], "eval_loss"):
        first = int(len(each.y) > 2 and each.x["step"][0] == 0)
        x = {axis: xs[first:] for axis, xs in each.x.items()}
        y = [math.exp(min(nats, 700)) for nats in each.y[first:]]
        last = short(y[-1], 4) if y else ""
        curves.append(replace(each, x=x, y=y, last=last))
    unit = "exp(held-out loss)"
    return Chart("perplexity", "Perplexity", unit, _dotted(curves), has_legend=False)


def _metrics(runs: list[RunRecord]) -> Iterator[Chart]:
    own = {key: None for run in runs for key in _keys(run, "own/")}
    for kind in (*_KINDS, *(_Kind(key, key.removeprefix("own/"), "run.code") for key in own)):
        curves = _several(runs, kind.key, scale=kind.scale, smooth=kind.is_noisy)
        values = [value for drawn in curves for value in drawn.y]
        if not values or (len(set(values)) == 1 and not kind.constant_too):
            continue
        if kind.is_noisy and len(runs) == 1 and len(curves[0].y) >= SMOOTHED_FROM:
            (raw,) = curves
            mean = curve(runs[0], kind.key, "mean", raw.colour, scale=kind.scale, smooth=True)
            curves = [replace(raw, style="faint"), mean]
        yield Chart(
            kind.key.replace("_", "-").replace("/", "-"),
            kind.title,
            kind.unit,
            curves,
            note=kind.note,
            limits=_limits(runs, kind.key),
            from_zero=kind.from_zero,
            has_legend=False,
        )


def _limits(runs: list[RunRecord], key: str) -> list[tuple[str, float]]:
    if len(runs) > 1:
        return []
    (run,) = runs
    limits = {
        "grad_norm": ("clipped to", run.planned("run", "optim", "clip_norm")),
        "step_time_s": ("predicted", run.planned("predicted_step_s")),
        "peak_allocated_gib": ("predicted", run.planned("estimate", "peak_allocated_gib")),
    }
    label, value = limits.get(key, ("", None))
    limit = number(value)
    return [(f"{label} {short(limit)}", limit)] if limit else []


def _sources(runs: list[RunRecord]) -> Iterator[Chart]:
    """Yield a chart for each source or named held-out set that runs share."""
    for prefix, title in (("eval_loss/", "Held-out loss"), ("loss/", "Training loss")):
        keys = {key: None for run in runs for key in _keys(run, prefix)}
        for place, key in enumerate(list(keys)[:8]):
            yield Chart(
                f"{prefix[:-1].replace('_', '-')}-{place}",
                f"{title}: {key.removeprefix(prefix)}",
                _unit(runs),
                _several(runs, key, smooth=prefix == "loss/"),
                has_legend=False,
            )


def reduced(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most about `most` values that draw the same line.

    They are the first, the lowest and the highest value of each of several equally long pieces.
    """
    if len(values) <= most:
        return list(range(len(values)))
    pieces = max(1, most // 3)
    chosen = {0, len(values) - 1}
    for piece in range(pieces):
        begin, end = (len(values) * place // pieces for place in (piece, piece + 1))
        here = range(begin, end)
        chosen |= {begin, min(here, key=values.__getitem__), max(here, key=values.__getitem__)}
    return sorted(chosen)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return means over up to `window` values around each."""
    half, sums, total = window // 2, [0.0], 0.0
    for value in values:
        total += value
        sums.append(total)
    means = []
    for at in range(len(values)):
        # Symmetrical, so that a slope is preserved; near the ends at least half as far, one-sided.
        reach = max(min(half, at, len(values) - 1 - at), half // 2)
        first, last = max(0, at - reach), min(len(values), at + reach + 1)
        means.append((sums[last] - sums[first]) / (last - first))
    return means
