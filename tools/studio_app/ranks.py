"""Pictures of a job's ranks on their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.layout.grid import Grid
from tools.layout.moments import Moment
from tools.studio_app.plans import PER_NODE
from tools.studio_app.svg import Svg

_WIDTH, _NODE, _IN_ONE_COLUMN = 760.0, 104.0, 4
CELL = 60.0
"""Height of a rank's box."""
_AFTER = {"gradients": "gradients", "optimizer": "optimizer", "weights": "weights"}
MOMENTS = (
    ("activations", "forward"),
    ("gradients", "backward, gradients"),
    ("optimizer", "optimizer"),
    ("weights", "weights gathered"),
    ("grid", "waits"),
)


@dataclass(frozen=True)
class Cell:
    """A rank's box."""

    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        """Its centre from the left."""
        return self.x + self.width / 2

    def fill(self, picture: Svg, colour: str, title: str, inset: float = 0) -> None:
        """Draw it."""
        size = self.width - 2 * inset, CELL - 2 * inset
        picture.rect(self.x + inset, self.y + inset, *size, colour, title=title)

    def write(
        self, picture: Svg, lines: Sequence[str], bold: bool = False, fill: str = "on-colour"
    ) -> None:
        """Write lines into it, as large as there is room."""
        room, each = self.width - 4, (CELL - 6) / len(lines)
        for place, text in enumerate(lines):
            y = self.y + 3 + each * (place + 0.5)
            size = 13 if not place else 11
            x = self.middle
            picture.text(
                x,
                y,
                text,
                fill=fill,
                anchor="middle",
                bold=bold and not place,
                size=size,
                room=room,
            )


def nodes_picture(nodes: int, label: str) -> tuple[Svg, list[Cell]]:
    """Return a picture of nodes, and the place of each rank."""
    columns = 2 if nodes > _IN_ONE_COLUMN else 1
    width = _WIDTH / columns
    picture = Svg(_WIDTH, -(-nodes // columns) * _NODE, label)
    cells = []
    for node in range(nodes):
        left, top = node % columns * width, node // columns * _NODE
        picture.rect(left + 3, top + 2, width - 6, _NODE - 8, "page", stroke="grid", radius=8)
        end = left + width - 12
        picture.text(end, top + 10, f"node {node}", size=11, fill="muted", anchor="end")
        each = (width - 24) / PER_NODE
        cells += [Cell(left + 12 + n * each, top + 26, each - 4) for n in range(PER_NODE)]
    return picture, cells


def moment_picture(grid: Grid, nodes: int, rank: int, moment: Moment) -> str:
    """Draw what every rank does at a moment of a step, and whom it talks to."""
    picture, cells = nodes_picture(nodes, f"{moment.kind} of {grid.world_size} ranks")
    for number, cell in enumerate(cells):
        stage = grid.coords(number).pipeline
        task = moment.work[stage]
        colour = _AFTER.get(moment.kind, "grid")
        text = {"gradients": "adds", "optimizer": "steps", "weights": "gathers"}.get(
            moment.kind, "waits"
        )
        if task is not None:
            colour = "activations" if task[0] == "forward" else "gradients"
            text = " ".join(map(str, task))
        cell.fill(picture, colour, f"rank {number}, stage {stage}: {text}")
        ink = "muted" if colour == "grid" else "on-colour"
        cell.write(picture, (f"stage {stage}", text), number == rank, ink)
    if moment.kind == "sums":
        for group in grid.groups("tensor"):
            if moment.work[grid.coords(group[0]).pipeline] is not None:
                _join(picture, [cells[number] for number in group])
    if moment.kind in ("gradients", "weights"):
        alike = [cells[number] for number in grid.group("data", rank)]
        places = [(cell.middle, cell.y + CELL + 5) for cell in alike]
        picture.line(places, "ink", width=2)
        for x, y in places:
            picture.circle(x, y, 4, "ink")
    peers = grid.group("pipeline", rank)
    for stage, to in moment.sends:
        _arrow(picture, cells[peers[stage]], cells[peers[to]])
    return str(picture)


def _join(picture: Svg, cells: list[Cell]) -> None:
    """A bar below boxes of a row, for each row that they are in."""
    for y in {cell.y for cell in cells}:
        row = [cell for cell in cells if cell.y == y]
        left = min(cell.x for cell in row)
        right = max(cell.x + cell.width for cell in row)
        picture.rect(left, y + CELL + 2, right - left, 5, "ink")


def _arrow(picture: Svg, one: Cell, other: Cell) -> None:
    """From box to box, between the rows of boxes."""
    down = other.y > one.y
    begin = one.y + CELL + 1 if down else one.y - 1
    lane = begin + 7 if down else begin - 8
    end = other.y - 2 if other.y >= one.y else other.y + CELL + 2
    points = [(one.middle, begin), (one.middle, lane), (other.middle, lane), (other.middle, end)]
    picture.line(points, "ink", width=2, arrow=True)
