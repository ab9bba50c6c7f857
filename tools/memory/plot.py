"""An estimate as a picture, as SVG: bars per phase and per ZeRO stage, peaks of other batches."""

from __future__ import annotations

from html import escape

from harness.planning.memory.changes import with_stage
from harness.planning.memory.inputs import GIB, PHASES
from harness.planning.memory.timeline import Estimate, estimate_memory
from tools.memory.frontier import HEIGHT, frontier

_COLOURS = [
    *("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7"),
    *("#9c755f", "#bab0ac", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2"),
    *("#17becf", "#bcbd22", "#7f7f7f", "#aec7e8", "#ffbb78", "#98df8a", "#c5b0d5", "#c49c94"),
]
_WIDTH, _HEIGHT, _TOP, _LEFT, _BAR, _GAP = 1160, 420, 40, 60, 34, 12


def svg(found: Estimate) -> str:
    """One picture with a legend; sizes in GiB."""
    bars = [(name, found.worst.phase(name)) for name in PHASES]
    for stage in range(4 if found.inputs.bounds is None else 2):
        other = estimate_memory(with_stage(found.inputs, stage)).worst
        bars.append((f"ZeRO {stage} peak", other.phase(other.peak_phase)))
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    most = max(sum(parts.values()) for _, parts in bars)
    if found.device_bytes:
        most = max(most, found.device_bytes)
    scale = _HEIGHT / most
    drawn = [_axis(most, scale)]
    for index, (label, parts) in enumerate(bars):
        left = _LEFT + index * (_BAR + _GAP) + (2 * _GAP if index >= len(PHASES) else 0)
        drawn.append(_stack(left, label, parts, colours, scale))
    if found.device_bytes:
        height = _TOP + _HEIGHT - found.device_bytes * scale
        drawn.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 220}" y1="{height:.1f}" y2="{height:.1f}" '
            f'stroke="#c00" stroke-dasharray="6 4"/>'
        )
    for index, name in enumerate(names):
        y = _TOP + 18 * index
        drawn.append(
            f'<rect x="{_WIDTH - 205}" y="{y}" width="12" height="12" fill="{colours[name]}"/>'
            f'<text x="{_WIDTH - 188}" y="{y + 10}">{escape(name)}</text>'
        )
    bottom = _TOP + max(_HEIGHT + 120, 18 * len(names))
    drawn.append(frontier(found, bottom))
    total = bottom + HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{total}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(drawn)}</svg>\n"
    )


def _axis(most: float, scale: float) -> str:
    marks = []
    for part in range(5):
        size = most * part / 4
        y = _TOP + _HEIGHT - size * scale
        marks.append(
            f'<text x="4" y="{y + 4:.1f}">{size / GIB:.1f} GiB</text>'
            f'<line x1="{_LEFT - 4}" x2="{_WIDTH - 220}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
    return "".join(marks)


def _stack(
    left: int, label: str, parts: dict[str, int], colours: dict[str, str], scale: float
) -> str:
    drawn, bottom = [], float(_TOP + _HEIGHT)
    for name, size in parts.items():
        height = size * scale
        bottom -= height
        drawn.append(
            f'<rect x="{left}" y="{bottom:.2f}" width="{_BAR}" height="{height:.2f}" '
            f'fill="{colours[name]}"><title>{escape(name)}: {size / GIB:.2f} GiB</title></rect>'
        )
    x, y = left + _BAR / 2, _TOP + _HEIGHT + 12
    drawn.append(f'<text x="{x}" y="{y}" transform="rotate(45 {x} {y})">{escape(label)}</text>')
    return "".join(drawn)
