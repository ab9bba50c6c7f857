"""Show runs: one as a page, several side by side, or all below a folder.

    python tools/report.py runs/first                    # writes runs/first/report.html
    python tools/report.py runs/a runs/b --out ab.html   # overlaid; what differs; which is best
    python tools/report.py /shared/runs --price 2.5      # all runs below it: owner, state, cost
    python tools/report.py runs/first --plot curve.svg   # a picture, .svg or .png

The page is one file that opens anywhere, without a network. A run may be in progress, interrupted
or damaged: the page shows whatever exists. Exit code 0, or 2 if there is no run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode
from harness.report.chart import Chart, Curve, colour_of
from harness.report.charts import charts
from harness.report.compare import MOST_DRAWN, compare_page_of, named, over_seeds, ranked, used
from harness.report.formatting import count, short
from harness.report.page import NAME, described, page_of, write_page
from harness.report.palette import FAINT, MUTED, SERIES
from harness.report.repeats import band_of
from harness.report.run_record import RunRecord, read, runs_in
from harness.report.verdicts import progress, state
from harness.terminal import command_parser
from tools.figure import new_figure, plot_problems, with_thousands, write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALL = Path("runs")
_BESIDE = ("learning-rate", "grad-norm", "mfu", "perplexity", "tokens-per-s")
"""Charts for the row below the loss; the first three with values are drawn."""


def main(argv: list[str]) -> int:
    """Run the command: argv -> a page or a plot -> exit code."""
    args = _parser().parse_args(argv)
    try:
        runs = _read(args.runs)
        if problems := list(plot_problems(args.plot)):
            raise ConfigError(problems)
        if args.plot:
            write_plot(args.plot, drawn(runs))
            return int(ExitCode.DONE)
        folder = args.runs[0] if len(args.runs) == 1 else args.runs[0].parent
        out = args.out or folder / NAME
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"--out {out}: there is no folder {out.parent}")
        if runs[0].path == folder:
            page = page_of(runs[0])
        else:
            print(listed(runs, args.price), end="\n\n")
            page = compare_page_of(runs, f"{len(runs)} runs", args.price)
        write_page(out, page)
    except (ConfigError, OSError) as error:
        print(f"cannot report: {error}", file=sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    print(out)
    return int(ExitCode.DONE)


def _parser() -> argparse.ArgumentParser:
    parser, add = command_parser(__doc__)
    add("runs", nargs="*", type=Path, default=[ALL], help="run folders, or folders of runs (runs/)")
    add("--out", type=Path, help="page to write")
    add("--plot", type=Path, metavar="FILE.svg|png", help="write a picture instead of a page")
    add("--price", type=float, help="price per GPU-hour, for the cost so far")
    return parser


def _read(folders: list[Path]) -> list[RunRecord]:
    """Return the runs at or below the folders. Raises ConfigError for a folder without a run."""
    by_folder = {folder: runs_in(folder) for folder in folders}
    if problems := [f"{folder} holds no run" for folder, paths in by_folder.items() if not paths]:
        raise ConfigError(problems)
    return [
        read(path, "" if path == folder else str(path.relative_to(folder)))
        for folder in folders
        for path in by_folder[folder]
    ]


def listed(runs: list[RunRecord], price: float | None) -> str:
    """Return the runs as a table of text: whose they are, how far, and what they used."""
    heads = ("run", "owner", "state", "steps", "held-out", "GPU hours")
    heads += ("cost",) * (price is not None)
    rows = [heads]
    for run in runs:
        owner = run.text("owner") or "-"
        loss = "-" if (best := run.best()) is None else f"{best[1]:.4f}"
        rows.append((run.name, owner, state(run), progress(run), loss, *used(run, price)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def drawn(runs: list[RunRecord]) -> Figure:
    """Return a figure with a large loss chart, and three small charts below it."""
    runs = ranked(runs)[:MOST_DRAWN]
    by_name = {chart.name: _over_seeds(chart, runs) for chart in charts(runs)}
    figure = new_figure(9.5, 5.6, *_titles(runs))
    upper, lower = figure.subfigures(2, 1, height_ratios=(5, 3))
    loss = upper.subplots(1, 1 if len(runs) == 1 else 2, squeeze=False)[0]
    _draw(loss[0], by_name["loss"])
    if len(runs) > 1:
        _draw(loss[1], by_name["held-out"])
        loss[1].legend(loc="upper right", ncols=1 + len(runs) // 12, fontsize=8)
    drawable = [by_name[name] for name in _BESIDE if name in by_name]
    beside: list[Chart | None] = [c for c in drawable if any(curve.y for curve in c.curves)]
    for axis, chart in zip(lower.subplots(1, 3), [*beside, None, None, None], strict=False):
        if chart is None:
            axis.set_axis_off()
        else:
            _draw(axis, chart)
    return figure


def _over_seeds(chart: Chart, runs: list[RunRecord]) -> Chart:
    """Return a chart of losses with a mean and a band for runs that differ in their seed alone."""
    groups = named(over_seeds(runs))
    if len(groups) == len(runs) or len(chart.curves) != len(runs):
        return chart
    curves = list[Curve]()
    for place, (name, group) in enumerate(groups):
        of_group = [chart.curves[runs.index(run)] for run in group]
        points = [[*zip(curve.x["step"], curve.y, strict=True)] for curve in of_group]
        curves += band_of(points, name, colour_of(place))
    return replace(chart, curves=curves)


def _titles(runs: list[RunRecord]) -> tuple[str, str]:
    """Return the title (model and cluster) and the subtitle (results)."""
    (first, *others), best = runs, runs[0].best()
    held_out = f"held-out loss {best[1]:.2f} nats per token" if best else "not evaluated"
    if others:
        title = f"{len(runs)} runs of {described(first)}"
        if (sets := len({run.held_out_set for run in runs})) > 1:
            return title, f"{sets} held-out sets, whose losses cannot be compared"
        return title, f"best: {first.name}, {held_out}"
    tokens = f", {short(first.tokens_at(first.lines[-1]))} tokens" if first.lines else ""
    return described(first), f"{count(first.step)} steps{tokens}: {held_out}"


def _draw(axis: Axes, chart: Chart) -> None:
    for curve in chart.curves:
        if curve.y:
            _draw_curve(axis, curve, chart)
    shown = [value for curve in chart.curves for value in curve.y]
    for label, value in chart.limits:
        if shown and value <= max(shown):
            axis.axhline(value, color=MUTED.light, ls=(0, (4, 3)), lw=1)
            axis.annotate(
                label,
                (0, value),
                (3, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=MUTED.light,
            )
    for mark in chart.marks:
        axis.axvline(mark.x["step"], color=FAINT.light, lw=0.7, zorder=0)
    axis.set_title(chart.title)
    axis.set_title(chart.unit, loc="right", fontsize=8, fontweight="normal", color=MUTED.light)
    axis.set_xlabel("step")
    with_thousands(axis.xaxis)
    if len(shown) > 20 and chart.from_zero:
        axis.set_ylim(bottom=0, top=max(1.15 * sorted(shown)[int(0.99 * len(shown))], 1e-12))
        if median(shown) >= 1000:
            with_thousands(axis.yaxis)


def _draw_curve(axis: Axes, curve: Curve, chart: Chart) -> None:
    place = curve.colour.removeprefix("var(--series-").removesuffix(")")
    colour = SERIES[int(place) - 1].light if place.isdecimal() else MUTED.light
    faint, xs = curve.style == "faint", next(iter(curve.x.values()))
    if curve.style == "band":
        axis.fill(xs, curve.y, color=colour, alpha=0.15, lw=0)
        return
    axis.plot(
        xs,
        curve.y,
        color=colour,
        lw=0.8 if faint else 1.8,
        alpha=0.35 if faint else 1,
        ls=":" if curve.style == "dashed" else "-",
        marker="o" if curve.style == "dots" and len(curve.y) <= 60 else "",
        ms=4.5,
        label=None if faint else f"{curve.label} {curve.last}",
    )
    if faint or not chart.has_legend:
        return
    axis.annotate(
        f"{curve.label} {curve.last}",
        (xs[-1], curve.y[-1]),
        (6, 0),
        textcoords="offset points",
        color=colour,
        va="center",
        annotation_clip=False,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
