"""Colours and fonts, as the tools import them; they are written by training runs, too."""

from __future__ import annotations

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
