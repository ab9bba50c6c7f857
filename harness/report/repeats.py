"""Runs that differ in their seed alone, as one: mean and standard deviation."""

import statistics
from collections.abc import Sequence

from harness.report.chart import Curve, colour_of, html_of, lines
from harness.report.formatting import escaped
from harness.report.run_record import RunRecord

Points = Sequence[tuple[float, float]]


def band_of(runs: Sequence[Points], label: str, colour: str, **more: object) -> list[Curve]:
    """Return the mean of curves, and around it a band of their standard deviation (n - 1), at the
    places that all of them have; of a single curve, the curve itself.
    """
    of_run = [dict(points) for points in runs if points]
    places = sorted(set.intersection(*map(set, of_run))) if of_run else []
    at = [[values[place] for values in of_run] for place in places]
    means = [statistics.fmean(values) for values in at]
    xs = [float(place) for place in places]
    drawn = [Curve(label, colour, {"x": xs}, means, **more)]  # type: ignore[arg-type]
    if len(of_run) > 1 and len(places) > 1:
        spread = [statistics.stdev(values) for values in at]
        over = [mean + width for mean, width in zip(means, spread, strict=True)]
        under = [mean - width for mean, width in zip(means, spread, strict=True)]
        edge = {"x": [*xs, *reversed(xs)]}
        drawn.insert(0, Curve("", colour, edge, [*over, *reversed(under)], "band"))
    return drawn


def seeds_section(groups: Sequence[tuple[str, Sequence[RunRecord]]]) -> str:
    """Return a chart and a table of named groups of runs, each of which differ in their seed alone;
    "" if no group has several.
    """
    if all(len(group) < 2 for _, group in groups):
        return ""
    drawn, rows = list[Curve](), list[str]()
    for place, (name, group) in enumerate(sorted(groups, key=lambda named: _mean(named[1]))):
        colour = colour_of(place)
        drawn += band_of([run.evaluations() for run in group], name, colour)
        losses = _losses(group)
        cells = (f"{_mean(group):.4f}" if losses else "-", _deviation(losses), str(len(losses)))
        swatch = f'<i class=swatch style="--c:{colour}"></i>'
        values = "".join(f"<td>{cell}" for cell in cells)
        runs = " ".join(run.name for run in group)
        rows.append(f"<tr><td>{swatch}<td>{escaped(name)}<td>{escaped(runs)}{values}</tr>")
    chart = lines(
        "Held-out loss over the seeds", drawn, "step", has_legend=False, is_wide=True,
        note="Mean and standard deviation of runs that differ in train.seed alone.",
    )  # fmt: skip
    heads = "".join(f"<th>{head}" for head in ("", "values", "runs", "held-out", "std", "n"))
    return (
        f"<section class=charts>{html_of(chart)}</section><section class='card capped'>"
        f"<table class=runs><tr>{heads}</tr>{''.join(rows)}</table></section>"
    )


def _losses(group: Sequence[RunRecord]) -> list[float]:
    """Return the held-out loss of every run's best weights that can be used."""
    return [best[1] for run in group if (best := run.best()) is not None]


def _mean(group: Sequence[RunRecord]) -> float:
    losses = _losses(group)
    return statistics.fmean(losses) if losses else float("inf")


def _deviation(losses: Sequence[float]) -> str:
    return f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "-"
