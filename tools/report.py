"""Show runs: one as a page, several side by side, or all of them.

    python tools/report.py runs/first                    # writes runs/first/report.html
    python tools/report.py runs/a runs/b --out ab.html   # overlaid; what differs; which is best
    python tools/report.py                               # all of runs/, into runs/report.html
    python tools/report.py runs/first --plot curve.svg   # a picture, .svg or .png

The page is one file that opens anywhere, without a network. A run may be in progress, interrupted
or damaged: the page shows whatever exists. Exit code 0, or 2 if there is no run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode
from harness.report.chart import Chart, Curve
from harness.report.charts import charts
from harness.report.compare import MOST_DRAWN, compare_page_of, ranked
from harness.report.formatting import count, short
from harness.report.page import NAME, described, page_of, write_page
from harness.report.palette import FAINT, MUTED, SERIES
from harness.report.run_record import RunRecord, is_run, read
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
        runs = [read(path) for path in _paths(args.runs)]
        if problems := list(plot_problems(args.plot)):
            raise ConfigError(problems)
        if args.plot:
            write_plot(args.plot, drawn(runs))
            return int(ExitCode.DONE)
        out = args.out or _place(args.runs, runs)
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"--out {out}: there is no folder {out.parent}")
        write_page(out, _page(args.runs, runs))
    except (ConfigError, OSError) as error:
        print(f"cannot report: {error}", file=sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    print(out)
    return int(ExitCode.DONE)


def _parser() -> argparse.ArgumentParser:
    parser, add = command_parser(__doc__)
    add("runs", nargs="*", type=Path, help="run folders (default: all of runs/)")
    add("--out", type=Path, help="page to write")
    add("--plot", type=Path, metavar="FILE.svg|png", help="write a picture instead of a page")
    return parser


def _paths(named: list[Path]) -> list[Path]:
    """Return the run folders. Raises ConfigError for a folder that is not one."""
    if named:
        if problems := [f"{path} is not a run folder" for path in named if not is_run(path)]:
            raise ConfigError(problems)
        return named
    folders = sorted(path for path in ALL.glob("*") if is_run(path)) if ALL.is_dir() else []
    if not folders:
        raise ConfigError(f"there is no run in {ALL.absolute()}: give a run folder")
    return folders


def _place(named: list[Path], runs: list[RunRecord]) -> Path:
    """Return the page's path: in the run's folder, or beside the runs."""
    if len(named) == 1:
        return named[0] / NAME
    return (runs[0].path.parent if named else ALL) / NAME


def _page(named: list[Path], runs: list[RunRecord]) -> str:
    if len(named) == 1:
        return page_of(runs[0])
    return compare_page_of(runs, f"{len(runs)} runs" if named else "All runs")


def drawn(runs: list[RunRecord]) -> Figure:
    """Return a figure with a large loss chart, and three small charts below it."""
    runs = ranked(runs)[:MOST_DRAWN]
    by_name = {chart.name: chart for chart in charts(runs)}
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
    faint = curve.style == "faint"
    axis.plot(
        curve.x["step"],
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
        (curve.x["step"][-1], curve.y[-1]),
        (6, 0),
        textcoords="offset points",
        color=colour,
        va="center",
        annotation_clip=False,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
