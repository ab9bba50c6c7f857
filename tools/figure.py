"""The tools' plots, drawn with matplotlib: SVG or PNG, according to the file name."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.layout.shape import num_parameters
from harness.report.formatting import short
from harness.report.palette import FAINT, FONTS, GRID, INK, LIMIT, MUTED, SERIES, SURFACE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from harness.plan.plan import Plan

SUFFIXES = (".svg", ".png")

_STYLE = {
    # Text stays text, and the same numbers give the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "",
    "font.size": 9,
    "font.family": [*FONTS, "DejaVu Sans", "sans-serif"],
    "text.color": INK.light,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.labelcolor": MUTED.light,
    "axes.edgecolor": FAINT.light,
    "axes.facecolor": SURFACE.light,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.limits": (-4, 12),
    "grid.color": GRID.light,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def plot_problems(path: Path | None) -> Iterator[str]:
    """Yield the problems that would prevent a plot at `path`, before any work is done."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        yield f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}"
    if not path.absolute().parent.is_dir():
        yield f"--plot {path}: there is no folder {path.parent}"
    if importlib.util.find_spec("matplotlib") is None:
        yield f"--plot {path} needs matplotlib: pip install matplotlib"


def new_figure(width: float, height: float, title: str = "", subtitle: str = "") -> Figure:
    """Return an empty figure, its size in inches, in the common style and without a window."""
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    # The fonts are for viewers of the SVG; sizes are measured in a font that matplotlib includes.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    style = {**_STYLE, "axes.prop_cycle": cycler(color=[colour.light for colour in SERIES])}
    matplotlib.rcParams.update(style)
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=SURFACE.light)
    if title:
        head = f"{title}\n{subtitle}" if subtitle else title
        figure.suptitle(head, x=0.008, ha="left", fontsize=10.5, linespacing=1.5)
    return figure


def titles(plan: Plan, batch: bool = True) -> tuple[str, str]:
    """Return title (model and cluster) and subtitle (layout and, with `batch`, the batch)."""
    world, grid, model = plan.world, plan.grid, plan.config.model
    size = f", {short(num_parameters(plan.shape))} parameters" if plan.shape else ""
    device = world.gpu or ("GPU" if world.accelerator == "cuda" else world.accelerator.upper())
    nodes = world.world_size // max(world.local_world_size, 1)
    on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
    sizes = {axis: getattr(grid, axis) for axis in ("pipeline", "tensor", "sequence", "expert")}
    split = "".join(f", {axis} {size}" for axis, size in sizes.items() if size > 1)
    way = plan.checkpointing
    recomputed = f", every {way} layers recomputed" if isinstance(way, int) else ""
    recomputed = (
        f", {way} recomputation" if way not in ("none", 0) and not recomputed else recomputed
    )
    samples = f", micro-batch {plan.micro_batch:,} x {plan.seq_len:,} tokens"
    accumulated = f", {plan.grad_accum:,} accumulated" if plan.grad_accum > 1 else ""
    return (
        f"{model.name}{size}, {world.world_size:,} x {device}{on_nodes}",
        f"ZeRO {plan.zero_stage}{split}, {plan.precision}{recomputed}"
        + f"{samples}{accumulated}" * batch,
    )


def limit_line(axis: Axes, value: float, label: str, at_end: bool = False) -> None:
    """Draw a limit with its label at the line's beginning or end."""
    axis.axhline(value, color=LIMIT.light, ls="--", lw=1.2)
    text = axis.annotate(
        label,
        (int(at_end), value),
        (-3 if at_end else 4, 4),
        ha="right" if at_end else "left",
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=LIMIT.light,
        bbox={"fc": SURFACE.light, "ec": "none", "alpha": 0.8, "pad": 0.5},
    )
    text.set_in_layout(False)


def with_thousands(axis: Axis) -> None:
    """Format the numbers of an axis as 12,000 instead of 1.2e4."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def write_plot(path: Path, figure: Figure) -> None:
    """Write the plot to the path of --plot, and report it."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {}, dpi=120)
    print(f"wrote {path}", file=sys.stderr)
