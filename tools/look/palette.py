"""Colours, fonts and titles that plots and pages share."""

from __future__ import annotations

from harness.layout.shape import num_parameters
from harness.plan.plan import Plan
from harness.report.formatting import short
from harness.report.palette import (
    COMPONENTS,
    FAINT,
    FONTS,
    GRID,
    INK,
    LIMIT,
    MONOSPACE,
    MUTED,
    PAGE,
    SERIES,
    SURFACE,
    VERDICTS,
    Colour,
    css,
    css_fonts,
)

__all__ = [
    "COMPONENTS",
    "FAINT",
    "FONTS",
    "GRID",
    "INK",
    "LIMIT",
    "MONOSPACE",
    "MUTED",
    "PAGE",
    "SERIES",
    "SURFACE",
    "VERDICTS",
    "Colour",
    "css",
    "css_fonts",
]


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
    samples = f", micro-batch {plan.micro_batch:,} x {plan.config.data.seq_len:,} tokens"
    accumulated = f", {plan.grad_accum:,} accumulated" if plan.grad_accum > 1 else ""
    return (
        f"{model.name}{size}, {world.world_size:,} x {device}{on_nodes}",
        f"ZeRO {plan.zero_stage}{split}, {plan.precision}{recomputed}"
        + f"{samples}{accumulated}" * batch,
    )
