"""3D parallelism: a step rank by rank, each rank's place and groups, and its memory."""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from harness.layout.grid import Axis, Grid
from harness.layout.stages import layers_per_stage
from harness.plan.duration import step_time
from harness.report.formatting import gib
from tools.layout.schedules import Moment, moments
from tools.studio_app import plans
from tools.studio_app.figures import Code, Drawing, Figure, Table, numbers
from tools.studio_app.page import Choice, Page, Slider, Values
from tools.studio_app.svg import WIDTH, Svg, series
from tools.studio_pages.plan import spent

_NODE, _IN_ONE_COLUMN = 104.0, 4
_HIGH = 60.0  # height of a rank's box
_MOMENTS = (
    ("activations", "forward"),
    ("gradients", "backward, gradients"),
    ("optimizer", "optimizer"),
    ("weights", "weights gathered"),
    ("grid", "waits"),
)
_AFTER = {"gradients": "adds", "optimizer": "steps", "weights": "gathers"}
"""Labels of ranks in the phases after the passes, by the phase, which is also a colour's name."""
_CAPTIONS = {
    "passes": "Passes: each stage computes a micro-batch, forward or backward, or waits",
    "sums": "In each layer of them, ranks of a tensor group add up their parts (the bars)",
    "sends": "Hidden states go on to the next stage, gradients back; arrows: the rank's group",
    "gradients": "Data ranks add up the gradients of all micro-batches; the line: the rank's group",
    "optimizer": "Each rank's optimizer steps with its share of the states",
    "weights": "ZeRO 1: data ranks gather the stepped weights; the line: the rank's group",
}
_AXES: dict[Axis, str] = {
    "tensor": "ranks that hold shards of one matrix; they communicate twice in every layer "
    "and pass",
    "data": "ranks that read different samples; they add gradients once per step",
    "pipeline": "ranks that hold successive layers; they pass on activations",
}


def figures(values: Values) -> list[Figure]:
    """Return the ranks on their nodes, a rank's groups, and the memory of each stage."""
    stages, tensor, nodes = values["stages"], values["tensor"], values["nodes"]
    grid = Grid(nodes * plans.PER_NODE, pipeline=stages, tensor=tensor)
    changes = (f"pipeline.stages={stages}", f"tensor_parallel.autotp_size={tensor}")
    values = {**values, "json": "3d", "gpus": grid.world_size}
    plan = plans.planned(values, changes)
    assert plan.stages is not None, "at least two stages"
    estimate, step = plans.estimate_of(plan), step_time(plan)
    assert step is not None, "every GPU of the page is known"
    waits = step.terms["bubble"] / step.seconds
    axis, rank = values["axis"], min(values["rank"], grid.world_size - 1)
    group = grid.group(axis, rank)
    turns = [*moments(grid, plan.grad_accum, estimate.inputs.zero.stage)]
    now = round(values["moment"] / 100 * (len(turns) - 1))
    turn = turns[now]
    when = f"tick {turn.tick + 1} of {turns[-1].tick + 1}" if any(turn.work) else "after the passes"
    verdict, peak = estimate.verdict, f"peak {gib(estimate.worst.peak)}"
    by_stage = {
        f"stage {n}": part.phase(part.peak_phase) for n, part in enumerate(estimate.fullest)
    }
    layers = ", ".join(map(str, layers_per_stage(plan.stages)))
    return [
        numbers(
            ("Ranks", str(grid.world_size), f"{stages} x {grid.data} x {tensor}"),
            ("Verdict", verdict, peak, plans.VERDICTS.get(verdict)),
            ("Rank", str(rank), grid.described(rank).strip(" ()")),
            (f"Its {axis} group", ", ".join(map(str, group)), _AXES[axis]),
            ("Moment", f"{now + 1} of {len(turns)}", when),
            ("A step", f"{step.seconds:,.2f} s", f"{waits:.0%} waiting"),
        ),
        Drawing(_CAPTIONS[turn.kind], _moment_picture(grid, nodes, rank, turn), _MOMENTS),
        spent(step),
        Drawing(
            f"{nodes} nodes of {plans.PER_NODE} GPUs; framed: rank {rank} and its {axis} group",
            _places_picture(grid, nodes, rank, group),
            [(series(stage), f"stage {stage}") for stage in range(stages)],
        ),
        plans.memory_bars(
            f"The fullest GPU of each stage at its peak; layers: {layers}",
            by_stage,
            estimate.device_bytes,
        ),
        _groups(grid),
        Code("Train with these settings", plans.train_command(values, changes)),
    ]


def crossing(grid: Grid, axis: Axis) -> int:
    """Return the number of groups along an axis that span several nodes."""
    return sum(len({rank // plans.PER_NODE for rank in group}) > 1 for group in grid.groups(axis))


def _groups(grid: Grid) -> Table:
    rows = []
    for axis, says in _AXES.items():
        groups = grid.groups(axis)
        counts = (len(groups), len(groups[0]), crossing(grid, axis))
        rows.append((axis, *map(str, counts), says))
    head = "axis|groups|ranks in each|crossing nodes|who they are"
    return Table("Groups of ranks", head, rows)


# --- the ranks on their nodes ---


class Cell(NamedTuple):
    """A rank's box."""

    x: float
    y: float
    width: float
    middle: float  # horizontal


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
        each = (width - 24) / plans.PER_NODE
        for x in (left + 12 + n * each for n in range(plans.PER_NODE)):
            cells.append(Cell(x, top + 26, each - 4, x + (each - 4) / 2))
    return picture, cells


def _places_picture(grid: Grid, nodes: int, rank: int, group: Collection[int]) -> str:
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


def _moment_picture(grid: Grid, nodes: int, rank: int, moment: Moment) -> str:
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


PAGE = Page(
    "hybrid",
    (
        Choice("model", "Model", plans.MODELS, "llama-65b"),
        plans.GPU,
        Slider("nodes", "Nodes", (1, 2, 4, 8, 16), 4, "of 8 GPUs"),
        Slider("stages", "Pipeline stages", (2, 4, 8, 16), 4),
        Slider("tensor", "Tensor parallel", (1, 2, 4, 8), 4, "GPUs", "GPU"),
        replace(plans.SEQ_LEN, default=2048),
        *(plans.CONTEXT, plans.MICRO_BATCH, plans.ACCUMULATION),
        Choice("checkpointing", "Checkpointing", ("none", "selective", "full"), "full"),
        Choice("axis", "Frame the group of", tuple(_AXES), "tensor"),
        Slider("rank", "Rank", tuple(range(128)), 0),
        Slider("moment", "Place in the step", tuple(range(101)), 10, "%", plays=True),
    ),
    figures,
)
