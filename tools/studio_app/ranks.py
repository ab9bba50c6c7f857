"""Pictures of a job's ranks on their nodes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from harness.layout.grid import Grid
from tools.layout.moments import Moment
from tools.studio_app.plans import PER_NODE
from tools.studio_app.svg import WIDTH, Svg, series

_NODE, _IN_ONE_COLUMN = 104.0, 4
_HIGH = 60.0  # height of a rank's box
MOMENTS = (
    ("activations", "forward"),
    ("gradients", "backward, gradients"),
    ("optimizer", "optimizer"),
    ("weights", "weights gathered"),
    ("grid", "waits"),
)
_AFTER = {"gradients": "adds", "optimizer": "steps", "weights": "gathers"}
"""Labels of the phases after the passes, by the colour of that name."""


@dataclass(frozen=True)
class Cell:
    """A rank's box."""

    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        """Horizontal center of the box."""
        return self.x + self.width / 2


def _nodes(nodes: int, label: str) -> tuple[Svg, list[Cell]]:
    """Return a picture of nodes, and the position of each rank."""
    columns = 2 if nodes > _IN_ONE_COLUMN else 1
    width = WIDTH / columns
    picture, cells = Svg(-(-nodes // columns) * _NODE, label), []
    for node in range(nodes):
        left, top = node % columns * width, node // columns * _NODE
        picture.rect(left + 3, top + 2, width - 6, _NODE - 8, "page", stroke="grid", radius=8)
        end = left + width - 12
        picture.text(end, top + 10, f"node {node}", size=11, fill="muted", anchor="end")
        each = (width - 24) / PER_NODE
        cells += [Cell(left + 12 + n * each, top + 26, each - 4) for n in range(PER_NODE)]
    return picture, cells


def places_picture(grid: Grid, nodes: int, rank: int, group: Collection[int]) -> str:
    """Return a picture of each rank's position on the three axes; a group's ranks are framed."""
    picture, cells = _nodes(nodes, f"{grid.world_size} ranks on {nodes} nodes")
    for number, cell in enumerate(cells):
        here, inset = grid.coords(number), 0
        if number in group:
            picture.rect(cell.x - 1, cell.y - 2, cell.width + 2, _HIGH + 4, "ink", radius=6)
            inset = 2
        title = f"rank {number}: pipeline {here.pipeline}, data {here.data}, tensor {here.tensor}"
        picture.box(
            cell.x + inset, cell.y + inset, cell.width - 2 * inset, _HIGH - 2 * inset,
            series(here.pipeline),
            (f"rank {number}", f"data {here.data}", f"tensor {here.tensor}"),
            title=title, bold=number == rank,
        )  # fmt: skip
    return str(picture)


def moment_picture(grid: Grid, nodes: int, rank: int, moment: Moment) -> str:
    """Return a picture of each rank's work at a moment of a step, and of its communication."""
    picture, cells = _nodes(nodes, f"{moment.kind} of {grid.world_size} ranks")
    for number, cell in enumerate(cells):
        stage = grid.coords(number).pipeline
        task = moment.work[stage]
        colour = moment.kind if moment.kind in _AFTER else "grid"
        text = _AFTER.get(moment.kind, "waits")
        if task is not None:
            colour = "activations" if task[0] == "forward" else "gradients"
            text = " ".join(map(str, task))
        picture.box(
            cell.x, cell.y, cell.width, _HIGH, colour, (f"stage {stage}", text),
            title=f"rank {number}, stage {stage}: {text}", bold=number == rank,
        )  # fmt: skip
    if moment.kind == "sums":
        for group in grid.groups("tensor"):
            if moment.work[grid.coords(group[0]).pipeline] is not None:
                _join(picture, [cells[number] for number in group])
    if moment.kind in ("gradients", "weights"):
        places = [(cells[n].middle, cells[n].y + _HIGH + 5) for n in grid.group("data", rank)]
        picture.line(places, "ink", width=2)
        for x, y in places:
            picture.circle(x, y, 4, "ink")
    peers = grid.group("pipeline", rank)
    for stage, to in moment.sends:
        _arrow(picture, cells[peers[stage]], cells[peers[to]])
    return str(picture)


def _join(picture: Svg, cells: list[Cell]) -> None:
    """Draw a bar below boxes that exchange data, one for each row of boxes."""
    for y in {cell.y for cell in cells}:
        row = [cell for cell in cells if cell.y == y]
        left, right = min(cell.x for cell in row), max(cell.x + cell.width for cell in row)
        picture.rect(left, y + _HIGH + 2, right - left, 5, "ink")


def _arrow(picture: Svg, one: Cell, other: Cell) -> None:
    """Draw an arrow between two boxes that runs between the rows."""
    down = other.y > one.y
    begin = one.y + _HIGH + 1 if down else one.y - 1
    lane = begin + 7 if down else begin - 8
    end = other.y - 2 if other.y >= one.y else other.y + _HIGH + 2
    points = [(one.middle, begin), (one.middle, lane), (other.middle, lane), (other.middle, end)]
    picture.line(points, "ink", width=2, arrow=True)
