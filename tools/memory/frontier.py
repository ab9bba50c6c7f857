"""The peak against micro-batch and against sequence length, drawn below the bars of an estimate."""

from __future__ import annotations

from dataclasses import replace

from harness.planning.memory.changes import with_micro_batch
from harness.planning.memory.inputs import GIB, Inputs
from harness.planning.memory.timeline import Estimate, estimate_memory

_WIDTH, _HEIGHT, _LEFT, _TOP, _APART = 400, 220, 60, 30, 120
HEIGHT = _TOP + _HEIGHT + 40
"""Pixels that `frontier` takes."""
_POINTS = 7  # each twice the one before
_SHORTEST = 512  # tokens

Curve = list[tuple[int, int]]
"""(micro-batch or tokens, bytes at the peak)."""


def by_micro_batch(found: Estimate) -> Curve:
    """Peaks for 1, 2, 4, ... samples at once, and the run's own."""
    inputs = found.inputs
    values = {2**power for power in range(_POINTS)} | {inputs.micro_batch}
    return [(n, _peak(with_micro_batch(inputs, n))) for n in sorted(values)]


def by_seq_len(found: Estimate) -> Curve:
    """Peaks for 512, 1,024, ... tokens, and the run's own length."""
    inputs = found.inputs
    values = {_SHORTEST * 2**power for power in range(_POINTS)} | {inputs.seq_len}
    return [(n, _peak(replace(inputs, seq_len=n))) for n in sorted(values)]


def frontier(found: Estimate, top: int) -> str:
    """Both curves as SVG elements, from `top` pixels on; the device's memory is the red line."""
    charts = (
        ("samples in a micro-batch", by_micro_batch(found), found.inputs.micro_batch),
        ("tokens in a sample", by_seq_len(found), found.inputs.seq_len),
    )
    return "".join(
        _chart(_LEFT + number * (_WIDTH + _APART), top + _TOP, *chart, found.device_bytes)
        for number, chart in enumerate(charts)
    )


def _peak(inputs: Inputs) -> int:
    return estimate_memory(inputs).worst.peak


def _chart(
    left: int, top: int, title: str, curve: Curve, chosen: int, device_bytes: int | None
) -> str:
    if device_bytes:  # beyond twice the device nothing is worth a look, but for the run's own
        curve = [(n, size) for n, size in curve if size <= 2 * device_bytes or n == chosen]
    most = max(size for _, size in curve)
    scale = _HEIGHT / most
    apart = _WIDTH / max(1, len(curve) - 1)
    drawn = [f'<text x="{left}" y="{top - 12}">peak against {title}</text>']
    for part in range(5):
        y = top + _HEIGHT * (1 - part / 4)
        drawn.append(
            f'<text x="{left - 56}" y="{y + 4:.1f}">{most * part / 4 / GIB:.1f} GiB</text>'
            f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
    at = []
    for index, (value, size) in enumerate(curve):
        x, y = left + index * apart, top + _HEIGHT - size * scale
        at.append(f"{x:.1f},{y:.1f}")
        weight = ' font-weight="bold"' if value == chosen else ""
        drawn.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5 if value == chosen else 3}" fill="#4e79a7">'
            f"<title>{value:,}: {size / GIB:.2f} GiB</title></circle>"
            f'<text x="{x:.1f}" y="{top + _HEIGHT + 18}" text-anchor="middle"{weight}>'
            f"{value:,}</text>"
        )
    drawn.append(f'<polyline points="{" ".join(at)}" fill="none" stroke="#4e79a7"/>')
    if device_bytes and device_bytes <= most:
        y = top + _HEIGHT - device_bytes * scale
        drawn.append(
            f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="#c00" stroke-dasharray="6 4"/>'
        )
    return "".join(drawn)
