"""Grids of every kind of division."""

from __future__ import annotations

from harness.layout.grid import Grid

GRIDS = [
    Grid(1),
    Grid(8),
    Grid(8, pipeline=2),
    Grid(8, tensor=2, sequence=2),
    Grid(24, pipeline=2, tensor=3, sequence=2),
]
