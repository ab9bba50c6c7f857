"""Pictures as SVG text, in the palette's colours by name, for light and dark surfaces."""

from __future__ import annotations

import math
from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]


class Svg:
    """A picture of `width` x `height` units, drawn from back to front. Any text is escaped."""

    def __init__(self, width: float, height: float, label: str) -> None:
        """`label`: the picture in a sentence, for readers who hear it."""
        self.size = width, height
        self.label = label
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        stroke: str = "none",
        opacity: float = 1,
        radius: float = 2,
        title: str = "",
    ) -> None:
        """A box; `fill` and `stroke` are names of the palette; `title` shows while pointed at."""
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" '
            f'height="{max(height, 0):.2f}" rx="{radius:g}" '
            f'style="fill:{_colour(fill)};stroke:{_colour(stroke)};opacity:{opacity:g}">'
            f"{_title(title)}</rect>"
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        fill: str = "ink",
        size: float = 13,
        anchor: Anchor = "start",
        bold: bool = False,
        room: float = math.inf,
    ) -> None:
        """A line of text; `y` is its middle, `room` the width that it must not exceed.

        A phone shows the whole picture, and so larger text in it (--text of look.css).
        """
        most = room / max(1, len(text)) / (0.66 if bold else 0.6)
        size_css = f"calc({size:g}px*var(--text,1))"
        if most < math.inf:
            size_css = f"min({size_css},{most:.1f}px)"
        self._parts.append(
            f'<text x="{x:.2f}" y="{y:.2f}" dominant-baseline="central" text-anchor="{anchor}" '
            f'style="fill:{_colour(fill)};font-size:{size_css};'
            f'font-weight:{600 if bold else 400}">{escape(text)}</text>'
        )

    def line(
        self,
        points: list[tuple[float, float]],
        stroke: str = "ink",
        *,
        width: float = 1.5,
        dashed: bool = False,
        arrow: bool = False,
    ) -> None:
        """A line through points, perhaps with an arrow at its end."""
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dashes = "stroke-dasharray:5 4;" if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" '
            f'style="fill:none;stroke:{_colour(stroke)};stroke-width:{width:g};{dashes}"/>'
        )
        if arrow:
            self._arrow(*points[-2], *points[-1], stroke)

    def _arrow(self, from_x: float, from_y: float, x: float, y: float, fill: str) -> None:
        length = ((x - from_x) ** 2 + (y - from_y) ** 2) ** 0.5 or 1.0
        along, across = (x - from_x) / length * 8, (y - from_y) / length * 8
        corners = [
            (x, y),
            (x - along - across / 2, y - across + along / 2),
            (x - along + across / 2, y - across - along / 2),
        ]
        path = " ".join(f"{a:.2f},{b:.2f}" for a, b in corners)
        self._parts.append(f'<polygon points="{path}" style="fill:{_colour(fill)}"/>')

    def path(self, path: str, fill: str, *, opacity: float = 1) -> None:
        """A filled shape, by its SVG path."""
        self._parts.append(f'<path d="{path}" style="fill:{_colour(fill)};opacity:{opacity:.3g}"/>')

    def circle(self, x: float, y: float, radius: float, fill: str, title: str = "") -> None:
        """A disc."""
        self._parts.append(
            f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}" style="fill:{_colour(fill)}">'
            f"{_title(title)}</circle>"
        )

    def __str__(self) -> str:
        width, height = self.size
        return (
            f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(self.label)}">'
            f"{''.join(self._parts)}</svg>"
        )


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _colour(name: str) -> str:
    """Return a name of the palette as CSS; "on-colour" is white, for text on filled boxes."""
    return {"none": "none", "on-colour": "#fff"}.get(name, f"var(--{name})")
