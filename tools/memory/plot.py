"""An estimate as a picture: bars per phase and ZeRO stage, peaks of other batches and lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.estimate.fit import with_stage
from harness.estimate.held import GIB, PHASES
from harness.estimate.timeline import Estimate, estimate_memory
from harness.report.charts import grouped
from tools.figure import limit_line, new_figure
from tools.look.palette import COMPONENTS, MUTED, SERIES
from tools.memory.heat import Curve, by_micro_batch, by_seq_len

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES = {
    "backward_first": "backward begins",
    "backward_last": "backward ends",
    "gradients_ready": "gradients ready",
    "between_steps": "between steps",
}
_BLUE, _ORANGE = (colour.light for colour in SERIES[:2])


def drawn(estimate: Estimate, title: str, subtitle: str) -> Figure:
    """One picture of six colours; sizes in GiB."""
    figure = new_figure(11.5, 8.2, title, subtitle)
    upper, lower = figure.subfigures(2, 1, height_ratios=(3, 2))
    phases, stages = upper.subplots(1, 2, width_ratios=(7, 2))
    worst = estimate.worst
    _bars(phases, {_PHASES.get(name, name): worst.phase(name) for name in PHASES})
    phases.set_title(f"Rank {worst.rank}, phase by phase")
    by_stage = {}
    for stage in range(4 if estimate.inputs.bounds is None else 2):
        other = estimate_memory(with_stage(estimate.inputs, stage)).worst
        by_stage[f"ZeRO {stage}"] = other.phase(other.peak_phase)
    _bars(stages, by_stage)
    stages.set_title("Peak of each ZeRO stage")
    for axis in (phases, stages):
        _device_line(axis, estimate.device_bytes, at_end=axis is stages)
        axis.set_ylabel("GiB")
    phases.legend(loc="upper right", ncols=len(COMPONENTS), fontsize=8, columnspacing=1.2)
    left, right = lower.subplots(1, 2)
    run, device = estimate.inputs, estimate.device_bytes
    _curve(left, "samples in a micro-batch", by_micro_batch(estimate), run.micro_batch, device)
    _curve(right, "tokens in a sample", by_seq_len(estimate), run.seq_len, device)
    return figure


def _bars(axis: Axes, sizes: dict[str, dict[str, int]]) -> None:
    """Draw stacked bars, each with its total."""
    groups = {name: grouped(parts) for name, parts in sizes.items()}
    places = range(len(groups))
    bottoms = [0.0] * len(groups)
    for component, colour in COMPONENTS.items():
        heights = [parts[component] / GIB for parts in groups.values()]
        axis.bar(
            places, heights, 0.74, bottoms, color=colour.light, label=component, ec="white", lw=0.6
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, total in zip(places, bottoms, strict=True):
        text = axis.annotate(
            f"{total:,.1f}" if total >= 1 else f"{total:.2f}",
            (place, total),
            (0, 3),
            textcoords="offset points",
            ha="center",
        )
        text.set_in_layout(False)
    axis.set_xticks(places, list(groups), rotation=35, ha="right")
    axis.set_ylim(0, max(bottoms) * 1.22)


def _curve(axis: Axes, title: str, curve: Curve, chosen: int, device_bytes: int | None) -> None:
    if device_bytes:  # beyond twice the device nothing is worth a look, but for the run's own
        curve = [(n, size) for n, size in curve if size <= 2 * device_bytes or n == chosen]
    labels, sizes = [f"{n:,}" for n, _ in curve], [size / GIB for _, size in curve]
    axis.plot(labels, sizes, marker="o", color=_BLUE)
    own = [n for n, _ in curve].index(chosen)
    axis.plot(labels[own], sizes[own], marker="o", ms=9, color=_ORANGE)
    for place, (label, size) in enumerate(zip(labels, sizes, strict=True)):
        text = axis.annotate(
            f"{size:.1f}",
            (label, size),
            (-4, 7),
            textcoords="offset points",
            ha="right" if place else "center",
            color=_ORANGE if place == own else MUTED.light,
            weight="bold" if place == own else "normal",
        )
        text.set_in_layout(False)
    _device_line(axis, device_bytes)
    axis.set(ylabel="GiB", xlabel="each twice the one before; orange: this run")
    axis.set_title(f"Peak against {title}")
    axis.set_ylim(0, max(sizes) * 1.18)
    axis.margins(x=0.08)


def _device_line(axis: Axes, device_bytes: int | None, at_end: bool = False) -> None:
    if device_bytes:
        label = f"{device_bytes / GIB:,.0f} GiB of the GPU"
        limit_line(axis, device_bytes / GIB, label, at_end)
