"""An estimate as a picture: bars per phase and ZeRO stage, peaks of other batches and lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.estimate.changes import with_stage
from harness.estimate.inputs import GIB, PHASES
from harness.estimate.timeline import Estimate, estimate_memory
from tools.figure import new_figure
from tools.memory.frontier import Curve, by_micro_batch, by_seq_len

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("tab20", "tab20b")  # matplotlib's, one after the other


def drawn(estimate: Estimate) -> Figure:
    """One picture with a legend; sizes in GiB."""
    figure = new_figure(11.5, 9)
    upper, lower = figure.subfigures(2, 1, height_ratios=(3, 2))
    _bars(upper.subplots(), estimate)
    left, right = lower.subplots(1, 2)
    run, device = estimate.inputs, estimate.device_bytes
    _curve(left, "samples in a micro-batch", by_micro_batch(estimate), run.micro_batch, device)
    _curve(right, "tokens in a sample", by_seq_len(estimate), run.seq_len, device)
    return figure


def _bars(axis: Axes, estimate: Estimate) -> None:
    from matplotlib import colormaps

    bars = [(name, estimate.worst.phase(name)) for name in PHASES]
    for stage in range(4 if estimate.inputs.bounds is None else 2):
        other = estimate_memory(with_stage(estimate.inputs, stage)).worst
        bars.append((f"ZeRO {stage} peak", other.phase(other.peak_phase)))
    places = [index + (index >= len(PHASES)) * 0.7 for index in range(len(bars))]
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    colours = [colour for cycle in _COLOURS for colour in colormaps[cycle].colors]
    bottoms = [0.0] * len(bars)
    for index, name in enumerate(names):
        sizes = [parts.get(name, 0) / GIB for _, parts in bars]
        axis.bar(places, sizes, 0.75, bottoms, color=colours[index % len(colours)], label=name)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    _device_line(axis, estimate.device_bytes)
    axis.set_ylabel("GiB")
    axis.set_xticks(places, [label for label, _ in bars], rotation=45, ha="right")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _curve(axis: Axes, title: str, curve: Curve, chosen: int, device_bytes: int | None) -> None:
    if device_bytes:  # beyond twice the device nothing is worth a look, but for the run's own
        curve = [(n, size) for n, size in curve if size <= 2 * device_bytes or n == chosen]
    labels, sizes = [f"{n:,}" for n, _ in curve], [size / GIB for _, size in curve]
    axis.plot(labels, sizes, marker="o", color="#4e79a7")
    own = [n for n, _ in curve].index(chosen)
    axis.plot(labels[own], sizes[own], marker="o", ms=9, color="#f28e2b")
    for label, size in zip(labels, sizes, strict=True):
        axis.annotate(f"{size:.1f}", (label, size), (0, 6), textcoords="offset points", ha="center")
    _device_line(axis, device_bytes)
    axis.set(title=f"peak against {title}", ylabel="GiB")
    axis.set_ylim(0, max(sizes) * 1.15)
    axis.grid(alpha=0.3)


def _device_line(axis: Axes, device_bytes: int | None) -> None:
    if device_bytes:
        axis.axhline(device_bytes / GIB, color="#c00", ls="--")
