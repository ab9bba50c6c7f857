"""Pictures as SVG text, in palette colours by name, for light and dark surfaces."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal, NamedTuple

Anchor = Literal["start", "middle", "end"]
WIDTH = 760.0
"""Width of every picture, in its own units."""


class Svg:
    """A picture of WIDTH x `height` units, drawn from back to front. All text is escaped."""

    def __init__(self, height: float, label: str) -> None:
        """`label` describes the picture in a sentence for screen readers."""
        self.height = height
        self.label = label
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none",
        opacity: float = 1, radius: float = 2, title: str = "",
    ) -> None:  # fmt: skip
        """Draw a box; `fill` and `stroke` are palette names; `title` shows under the pointer."""
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" '
            f'height="{max(height, 0):.2f}" rx="{radius:g}" '
            f'style="fill:{_colour(fill)};stroke:{_colour(stroke)};opacity:{opacity:g}">'
            f"{_title(title)}</rect>"
        )

    def text(
        self, x: float, y: float, text: str, *, fill: str = "ink", size: float = 13,
        anchor: Anchor = "start", bold: bool = False, room: float = math.inf,
    ) -> None:  # fmt: skip
        """Draw a line of text around `y`, at most `room` wide; phones enlarge it (look.css)."""
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
        self, points: Sequence[tuple[float, float]], stroke: str = "ink", *, width: float = 1.5,
        arrow: bool = False,
    ) -> None:  # fmt: skip
        """Draw a line through points, optionally with an arrow at its end."""
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        style = f"fill:none;stroke:{_colour(stroke)};stroke-width:{width:g}"
        self._parts.append(f'<polyline points="{path}" style="{style}"/>')
        if arrow:
            (from_x, from_y), (x, y) = points[-2:]
            length = math.hypot(x - from_x, y - from_y) or 1.0
            a, b = (x - from_x) / length * 8, (y - from_y) / length * 8
            corners = f"{x},{y} {x - a - b / 2},{y - b + a / 2} {x - a + b / 2},{y - b - a / 2}"
            self._parts.append(f'<polygon points="{corners}" style="fill:{_colour(stroke)}"/>')

    def path(self, path: str, fill: str, *, opacity: float = 1) -> None:
        """Draw a filled shape, given its SVG path."""
        self._parts.append(f'<path d="{path}" style="fill:{_colour(fill)};opacity:{opacity:.3g}"/>')

    def circle(self, x: float, y: float, radius: float, fill: str, title: str = "") -> None:
        """Draw a disc."""
        self._parts.append(
            f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}" style="fill:{_colour(fill)}">'
            f"{_title(title)}</circle>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, lines: Sequence[str],
        *, title: str = "", bold: bool = False, size: float = 13, opacity: float = 1,
    ) -> None:  # fmt: skip
        """Draw a box with lines of text, at most as large as fits."""
        self.rect(x, y, width, height, fill, title=title, opacity=opacity)
        ink = "muted" if fill == "grid" else "on-colour"
        each = (height - 6) / max(1, len(lines))
        for place, text in enumerate(lines):
            middle = y + 3 + each * (place + 0.5)
            self.text(
                x + width / 2, middle, text, fill=ink, anchor="middle", room=width - 4,
                bold=bold and not place, size=size if not place else size - 2,
            )  # fmt: skip

    def __str__(self) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH:g} {self.height:g}" role="img" '
            f'aria-label="{escape(self.label)}">'
            f"{''.join(self._parts)}</svg>"
        )


class Box(NamedTuple):
    """A box in a lane; `begin` and `end` are from 0 to 1."""

    lane: int
    begin: float
    end: float
    colour: str
    text: str = ""
    title: str = ""
    opacity: float = 1


def lanes(
    label: str, names: Sequence[str], boxes: Iterable[Box], *, row: float = 34, left: float = 80,
    bold: int = -1, back: str = "grid", top: float = 0,
) -> Svg:  # fmt: skip
    """Return a picture with a lane of boxes for each name; `bold` is the index of the active
    lane.
    """
    picture = Svg(top + len(names) * row, label)
    room = WIDTH - left
    for lane, name in enumerate(names):
        y = top + lane * row
        picture.text(0, y + row / 2, name, size=12, room=left - 6, bold=lane == bold)
        picture.rect(left, y + 3, room, row - 6, back, radius=0)
    for lane, begin, end, colour, text, title, opacity in boxes:
        width = (end - begin) * room
        shown = [text] if text and width > 7 else []
        picture.box(
            left + begin * room, top + lane * row + 3, max(width - 1, 0), row - 6, colour, shown,
            title=title, size=12, opacity=opacity,
        )  # fmt: skip
    return picture


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _colour(name: str) -> str:
    """Return a palette name as CSS; "on-colour" is white, for text on filled boxes."""
    return {"none": "none", "on-colour": "#fff"}.get(name, f"var(--{name})")


def series(place: int) -> str:
    """Return the colour name for an index; the eight colours repeat."""
    return f"series-{place % 8 + 1}"
