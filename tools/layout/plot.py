"""One step of a pipeline as a picture: what each stage does over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.layout.stages import bubble
from harness.plan.plan import Plan
from tools.figure import new_figure
from tools.layout.schedules import plan_spans, waiting
from tools.look.palette import GRID, SERIES, titles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"forward": SERIES[0].light, "backward": SERIES[1].light}
_READABLE = 0.014  # of the step: a shorter bar has no room for its number


def drawn(plan: Plan) -> Figure:
    """A row for each stage; a bar's length is its arithmetic, sending takes no time."""
    from matplotlib.patches import Rectangle

    bars = plan_spans(plan)
    stages, batches = plan.grid.pipeline, plan.grad_accum
    title, subtitle = titles(plan)
    figure = new_figure(11.5, 1.9 + 0.4 * stages, title, subtitle)
    axis = figure.subplots()
    end = max(span.end for span in bars)
    for kind, colour in _COLOURS.items():
        spans = [span for span in bars if span.kind == kind]
        axis.barh(
            [span.stage for span in spans],
            [(span.end - span.begin) / end for span in spans],
            left=[span.begin / end for span in spans],
            color=colour,
            edgecolor="white",
            lw=0.5,
            label=kind,
        )
    for span in bars:
        if (span.end - span.begin) / end >= _READABLE:
            middle = (span.begin + span.end) / 2 / end
            axis.text(middle, span.stage, span.micro_batch, color="white", ha="center", va="center")
    axis.add_patch(Rectangle((0, -0.4), 1, stages - 0.2, fc=GRID.light, zorder=0, label="waiting"))
    axis.grid(visible=False)
    axis.set_xlim(0, 1)
    axis.invert_yaxis()
    axis.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axis.set_xlabel("share of the step")
    axis.set_title(
        f"{stages} stages, {batches} micro-batches: {waiting(bars):.1%} of the step waiting "
        f"({bubble(stages, batches):.1%} with equally fast stages)",
    )
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure
