"""Plots layouts: a pipelined step over time, and the ZeRO shards of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.estimate.memory_item import GIB
from harness.layout.stages import bubble
from harness.plan.plan import Plan
from harness.report.charts import grouped
from harness.report.palette import COMPONENTS, FAINT, GRID, MUTED, SERIES
from tools.figure import new_figure, titles
from tools.layout.schedules import plan_spans, waiting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"forward": SERIES[0].light, "backward": SERIES[1].light}
_READABLE = 0.014  # share of the step; a shorter bar has no room for its number
_MOST_RANKS = 16
_STATES = {"weights": 3, "gradients": 2, "optimizer": 1}
"""The lowest ZeRO stage that partitions each state (arXiv 1910.02054, figure 1)."""
_THINNEST = 0.045  # share of a lane; a thinner slice would be invisible


def pipeline_drawn(plan: Plan) -> Figure:
    """Return a Gantt chart of a step's computation with a row per stage."""
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
        f"({bubble(stages, batches):.1%} with equally fast stages)"
    )
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def zero_drawn(plan: Plan) -> Figure:
    """Return a figure with a column per rank and a lane per state; the rank's shard is coloured."""
    title, subtitle = titles(plan)
    figure = new_figure(11.5, 4.2, title, subtitle)
    axis = figure.subplots()
    shards = plan.grid.data * plan.grid.sequence
    ranks = min(shards, _MOST_RANKS)
    for lane, (state, from_stage) in enumerate(reversed(_STATES.items())):
        is_divided = plan.zero_stage >= from_stage
        _lane(axis, lane, state, ranks, shards if is_divided else 1)
        share = f"1/{shards:,} on each rank" if is_divided else "replicated on every rank"
        axis.text(
            ranks - 0.2, lane + 0.5, f"{share}{_size(plan, state)}", va="center", color=MUTED.light
        )
    per_node = plan.world.local_world_size // (plan.grid.tensor * plan.grid.pipeline) or 1
    for node in range(per_node, ranks, per_node):
        axis.axvline(node - 0.5, color=FAINT.light, lw=1, ls=":")
    names = [f"rank {rank * plan.grid.tensor:,}" for rank in range(ranks)]
    if ranks < shards:
        names[-1] = f"... {plan.grid.world_size - 1:,}"
    axis.set_xticks(range(ranks), names, rotation=35 if ranks > 8 else 0)
    axis.set_yticks([lane + 0.5 for lane in range(len(_STATES))], list(reversed(_STATES)))
    axis.set_xlim(-0.6, ranks + 3.4)
    axis.set_ylim(-0.04, len(_STATES))
    axis.grid(visible=False)
    for spine in axis.spines.values():
        spine.set_visible(False)
    if per_node < ranks:
        axis.set_xlabel("dotted: the next node begins", loc="left")
    return figure


def _lane(axis: Axes, lane: int, state: str, ranks: int, parts: int) -> None:
    from matplotlib.patches import Rectangle

    for rank in range(ranks):
        box = (rank - 0.42, lane + 0.08)
        axis.add_patch(Rectangle(box, 0.84, 0.84, fc=GRID.light, ec="none"))
        height = max(0.84 / parts, _THINNEST)
        part = rank if rank < ranks - 1 or parts == 1 else parts - 1  # last column: last rank
        bottom = lane + 0.92 - height - (part * (0.84 - height) / max(parts - 1, 1))
        colour = COMPONENTS[state].light
        axis.add_patch(Rectangle((rank - 0.42, bottom), 0.84, height, fc=colour, ec="none"))


def _size(plan: Plan, state: str) -> str:
    """Return the estimated size of a state between two steps; "" if the model is unknown."""
    if plan.estimate is None:
        return ""
    size = grouped(plan.estimate.worst.phase("between_steps"))[state]
    return f", {size / GIB:,.2f} GiB" if size else ", none between steps"
